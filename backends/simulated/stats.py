"""What the HTTP faces measure of the answers they give, in seconds of their clients' clock."""

from __future__ import annotations

from backends.simulated.exposition import Histogram
from backends.simulated.sequence import Sequence

_LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class ExchangeStats:
    """Histograms with the buckets of vLLM 0.32.0, counts by finish reason and by refusal.

    speed   engine seconds per second of the clients' clock
    """

    def __init__(self, max_model_len: int, *, speed: float = 1.0) -> None:
        self._speed = speed
        token_bounds = [bound for bound in _TOKENS if bound <= max_model_len]
        self.first_token_s = Histogram(_FIRST_S)
        self.inter_token_s = Histogram(_TOKEN_S)
        self.per_output_token_s = Histogram(_TOKEN_S)
        self.whole_s = Histogram(_LONG_S)
        self.queued_s = Histogram(_LONG_S)
        self.inference_s = Histogram(_LONG_S)
        self.prefill_s = Histogram(_LONG_S)
        self.decode_s = Histogram(_LONG_S)
        self.prompt_tokens = Histogram(token_bounds)
        self.generation_tokens = Histogram(token_bounds)
        self.preemptions = Histogram((1, 2, 3, 4, 5, 10, 20))
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.rejected = dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), 0)
        self.in_flight = 0

    def on_first_token(self, sequence: Sequence) -> None:
        """A sequence has shown its first token."""
        self.first_token_s.observe((sequence.first_token_s - sequence.arrival_s) / self._speed)

    def on_tokens(self, gap_s: float, count: int) -> None:
        """`count` further tokens came, gap_s of engine time after the ones before."""
        self.inter_token_s.observe(gap_s / count / self._speed, count)

    def on_finished(self, sequence: Sequence, reason: str) -> None:
        """A sequence has all its tokens."""
        speed = self._speed
        self.finished[reason] += 1
        self.prompt_tokens.observe(sequence.prompt_tokens)
        self.generation_tokens.observe(sequence.output_tokens)
        self.preemptions.observe(sequence.preemptions)
        self.whole_s.observe((sequence.finished_s - sequence.arrival_s) / speed)
        self.queued_s.observe((sequence.scheduled_s - sequence.arrival_s) / speed)
        self.inference_s.observe((sequence.finished_s - sequence.scheduled_s) / speed)
        self.prefill_s.observe((sequence.first_token_s - sequence.scheduled_s) / speed)
        decode_s = (sequence.finished_s - sequence.first_token_s) / speed
        self.decode_s.observe(decode_s)
        if sequence.output_tokens > 1:
            self.per_output_token_s.observe(decode_s / (sequence.output_tokens - 1))
