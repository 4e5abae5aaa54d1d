"""Load on any server with OpenAI's routes: made-up or recorded traffic, sent in callbacks and measured at the client.

    traffic    what comes when: a trace, or arrivals drawn at a rate that may change
    client     one request, from its bytes to its last token
    run        open and closed loops
    score      where one class stands now; figures: what all of it came to; report: the same to keep

The demo's clients, `headrace load`, `headrace profile` and the benchmark of the data path are all made of it.
"""
