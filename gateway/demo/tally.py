"""What one class came to since the start, for the demo's closing words: the live view's score forgets what is not recent."""

from __future__ import annotations

from gateway.load.figures import Gaps
from gateway.load.score import Score


class Tally:
    """A `Watch` around a score: tells it all, and keeps first tokens (in bins) and tokens of the whole time."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.ttft = Gaps()
        self.tokens_seen = 0
        self.start = score.start
        self.ended = score.ended

    def first_token(self, ttft_s: float) -> None:
        """See `gateway.load.client.Watch`."""
        self.score.first_token(ttft_s)
        self.ttft.add(ttft_s)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """See `gateway.load.client.Watch`."""
        self.score.tokens(count, gap_s)
        self.tokens_seen += count
