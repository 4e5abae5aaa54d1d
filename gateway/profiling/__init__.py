"""What a live engine can do: a bounded sweep of it, the step model that explains what was seen, and what follows.

observations   what was measured, as steps of unknown duration
fit            the step model that explains it (the equations of `backends.simulated.step_model`)
sweep          the measuring: prompts alone, batches together, a long prompt beside a decoding stream
limits         the knee, what the memory holds, how many at once
advice         settings for the engine with their reasons, as a command line, for compose and for Helm
document       the profile that `headrace simulate` and `headrace replay` read, a page and a picture
"""
