"""Parameters of real engines on real GPUs, each with its source: what a virtual engine is made of.

One JSON file a profile, in `profiles/`. They hold parameters and citations, no measured tables. `load_profile` reads
one of them by name, or a file of the user's own by path; `build_engine` makes a vLLM-like, a TGI-like or a static
engine of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from backends.simulated.blocks import BLOCK_TOKENS
from backends.simulated.continuous import ContinuousLimits, ContinuousScheduler, SchedulingPolicy
from backends.simulated.engine import Engine
from backends.simulated.reserved import ReservedLimits, ReservedScheduler
from backends.simulated.scheduler import Totals
from backends.simulated.static import StaticLimits, StaticScheduler
from backends.simulated.step_model import PowerModel, StepModel

PROFILES_DIR = Path(__file__).parent / "profiles"
LONGEST_MODEL_LEN = 131_072
"""Context length of the Llama 3.1 and Qwen3 models behind the profiles; the KV memory may allow less."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine: its step model, memory and seats, and where the figures come from.

    kind          how well it is known: "measured+validated", "component-measured", ...
    source        repository, commit, licence and files of the figures
    derivation    how the parameters follow from the source, where they are not in it
    fitted_on     what was fitted on which data; "": nothing
    validated_on  what it was compared with that had no part in it
    lookahead     steps are planned one ahead (vLLM's asynchronous scheduling)
    power_model   None where no power was measured
    """

    name: str
    model: str
    gpu: str
    step_model: StepModel
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kind: str
    source: str
    derivation: str = ""
    fitted_on: str = ""
    validated_on: str = ""
    lookahead: bool = False
    power_model: PowerModel | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What may be set on top of a profile; None keeps the profile's own.

    max_model_len   None: the model's context length, or what the KV memory allows
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    block_tokens: int = BLOCK_TOKENS
    prefix_caching: bool = False


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in PROFILES_DIR.glob("*.json"))


def _nearest(name: str) -> str:
    """What to write in place of a name that no profile has: those that it begins, else the one that looks most like it."""
    names = profile_names()
    meant = [one for one in names if one.startswith(name)] or get_close_matches(name, names, 1)
    return f"did you mean {' or '.join(map(repr, meant))}?" if meant else f"expected one of {', '.join(names)}"


def load_profile(name: str) -> Profile:
    """Read a shipped profile by name, or any profile file by its path (ending in .json).

    Raises ValueError naming the nearest profile, or the field that is wrong.
    """
    path = Path(name) if name.endswith(".json") else PROFILES_DIR / f"{name}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"profile {name!r}: not found; {_nearest(name)}") from error
    except ValueError as error:
        raise ValueError(f"profile {name!r}: not JSON ({error}); fix the file") from error
    try:
        return _profile(path.stem, document)
    except (KeyError, TypeError) as error:
        raise ValueError(f"profile {name!r}: field {error} is missing or wrong; compare with a shipped one") from error


def continuous_limits(profile: Profile, options: EngineOptions) -> ContinuousLimits:
    """What a vLLM-like engine of this profile is started with."""
    kv_tokens = options.kv_tokens or profile.kv_tokens
    seats = options.max_num_seqs or profile.max_num_seqs
    usable_tokens = (kv_tokens // options.block_tokens - 1) * options.block_tokens
    return ContinuousLimits(
        kv_tokens=kv_tokens,
        max_num_seqs=seats,
        max_num_batched_tokens=options.max_num_batched_tokens or max(profile.max_num_batched_tokens, seats),
        max_model_len=options.max_model_len or min(LONGEST_MODEL_LEN, usable_tokens),
        block_tokens=options.block_tokens,
        scheduling_policy=options.scheduling_policy,
        prefix_caching=options.prefix_caching,
    )


def reserved_limits(profile: Profile, options: EngineOptions) -> ReservedLimits:
    """What a TGI-like engine of this profile is started with."""
    kv_tokens = options.kv_tokens or profile.kv_tokens
    return ReservedLimits(
        max_batch_total_tokens=kv_tokens,
        max_batch_prefill_tokens=options.max_num_batched_tokens or profile.max_num_batched_tokens,
        max_total_tokens=options.max_model_len or min(LONGEST_MODEL_LEN, kv_tokens),
        max_batch_size=options.max_num_seqs or profile.max_num_seqs,
    )


def build_engine(profile: Profile, options: EngineOptions | None = None) -> Engine:
    """A vLLM-like engine: continuous batching, paged KV, preemption by recomputing."""
    totals = Totals()
    scheduler = ContinuousScheduler(continuous_limits(profile, options or EngineOptions()), totals)
    return Engine(scheduler, profile.step_model, totals, power_model=profile.power_model, lookahead=profile.lookahead)


def build_reserving_engine(profile: Profile, options: EngineOptions | None = None) -> Engine:
    """A TGI-like engine: prompt + max_new_tokens reserved, nobody preempted."""
    totals = Totals()
    scheduler = ReservedScheduler(reserved_limits(profile, options or EngineOptions()), totals)
    return Engine(scheduler, profile.step_model, totals, power_model=profile.power_model)


def build_static_engine(profile: Profile, *, rows: int, kv_tokens: int | None = None) -> Engine:
    """An engine with static batches of up to `rows` sequences, for comparison."""
    totals = Totals()
    scheduler = StaticScheduler(StaticLimits(kv_tokens or profile.kv_tokens, rows), totals)
    return Engine(scheduler, profile.step_model, totals, power_model=profile.power_model)


def _profile(name: str, document: Mapping[str, object]) -> Profile:
    def numbers(field: str) -> dict[str, float]:
        section = document[field]
        if not isinstance(section, dict):
            raise TypeError(field)
        return {str(key): float(value) for key, value in section.items()}

    engine = numbers("engine")
    return Profile(
        name=name,
        model=str(document["model"]),
        gpu=str(document["gpu"]),
        step_model=_step_model(numbers("step_ms")),
        kv_tokens=int(engine["kv_tokens"]),
        max_num_seqs=int(engine["max_num_seqs"]),
        max_num_batched_tokens=int(engine["max_num_batched_tokens"]),
        kind=str(document["kind"]),
        source=str(document["source"]),
        derivation=str(document.get("derivation", "")),
        fitted_on=str(document.get("fitted_on", "")),
        validated_on=str(document.get("validated_on", "")),
        lookahead=bool(engine.get("lookahead", 0)),
        power_model=PowerModel(**numbers("power_w")) if "power_w" in document else None,
    )


def _step_model(numbers: dict[str, float]) -> StepModel:
    ranks = int(numbers.pop("ranks", 1))
    return StepModel(**numbers, ranks=ranks)
