"""What one virtual engine is started with: engine, dialect, limits, and how it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from backends.simulated.profiles import EngineOptions


class Dialect(StrEnum):
    """Whose HTTP it speaks, and whose scheduler it has."""

    VLLM = "vllm"
    TGI = "tgi"


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """See the module header.

    model                    name that requests have to ask for
    profile                  a shipped profile's name, or a path ending in .json
    speed                    engine seconds per second, > 0
    seed                     of the lengths drawn where the client sets none, and of ids
    api_key                  vLLM: required on /v1 routes as a bearer token
    max_num_queued_reqs      vLLM: sequences that may wait in the engine before 503; None: no bound
    max_num_queued_tokens    vLLM: prompt tokens waiting or in prefill before 503; None: no bound
    max_concurrent_requests  TGI: requests taken at once, beyond which it is overloaded
    shutdown_timeout_s       vLLM: time in-flight requests get to finish when told to stop; 0 cuts them at once
    output_median_tokens, output_sigma   lognormal of the lengths drawn
    """

    model: str = "sim-8b"
    profile: str = "h100_llama31_8b_tp1"
    dialect: Dialect = Dialect.VLLM
    options: EngineOptions = field(default_factory=EngineOptions)
    speed: float = 1.0
    seed: int = 0
    api_key: str | None = field(default=None, repr=False)
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_concurrent_requests: int = 128
    shutdown_timeout_s: float = 0.0
    output_median_tokens: float = 129.0
    output_sigma: float = 0.93

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ValueError(f"speed {self.speed}: must be > 0 and finite; 1 is real time")
        if self.shutdown_timeout_s < 0:
            raise ValueError(f"shutdown_timeout_s {self.shutdown_timeout_s}: must be >= 0; 0 cuts at once")
        if self.output_median_tokens < 1 or self.output_sigma < 0:
            raise ValueError(
                f"output lengths median {self.output_median_tokens} sigma {self.output_sigma}: "
                "median must be >= 1 and sigma >= 0"
            )
