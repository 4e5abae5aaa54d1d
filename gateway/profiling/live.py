"""The model that a running gateway has learned of an engine, as a profile; and how far it is from a stored one.

What is learned in service has four coefficients: a step, each sequence, each token of context, each token of a prompt. A
profile says more, so the one is found that explains the other best over usual batches and prompts, by the same fit as
a sweep's. It knows nothing of what the traffic did not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import orjson

from backends.base import BackendError, EngineAddress
from backends.connection import EnginePool
from backends.simulated.step_model import StepModel
from gateway.addresses import normalise_url
from gateway.errors import StartError
from gateway.profiling.document import as_step
from gateway.profiling.fit import fit
from gateway.profiling.observations import Alone, Seen, Together
from policies.sizing import LearnedStep

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 1024, 2048)
PROMPTS = (64, 128, 256, 512, 1024, 2048)
TRUSTED_SEEN = 64
TRUSTED_ERROR = 0.25
"""A learned model that saw less, or errs more, is not compared with anything."""


def drift(stored: StepModel, learned: LearnedStep) -> float | None:
    """How far the learned model is from the stored one: the largest relative difference of what usual work takes.

    Usual work is a decoding batch of 8 and of 32 with 1,024 tokens each, and a prompt of 1,024 tokens. None: too little
    was learned.
    """
    if learned.seen < TRUSTED_SEEN or learned.error > TRUSTED_ERROR:
        return None
    pairs = [(stored.step_s(batch, batch * 1024), decode_s(learned, batch, batch * 1024)) for batch in (8, 32)]
    pairs.append((stored.step_s(0, 0, [(1024, 0)]), prompt_s(learned, 1024)))
    return max(abs(now_s / before_s - 1) for before_s, now_s in pairs)


def decode_s(learned: LearnedStep, batch: int, context_tokens: float) -> float:
    """A decode step."""
    return learned.base_s + learned.per_sequence_s * batch + learned.per_context_token_s * context_tokens


def prompt_s(learned: LearnedStep, tokens: int) -> float:
    """A step with a prompt in it and nothing else."""
    return learned.base_s + learned.per_prompt_token_s * tokens


def of_learned(learned: LearnedStep) -> StepModel:
    """The step model that predicts what the learned one does."""
    together = tuple(
        Together(batch, float(batch * context), decode_s(learned, batch, batch * context))
        for batch in BATCHES
        for context in CONTEXTS
    )
    return fit(Seen(tuple(Alone(tokens, prompt_s(learned, tokens)) for tokens in PROMPTS), together)).model


async def exported(url: str, engine: str) -> dict[str, object]:
    """The profile of an engine from the gateway whose admin listener is at url. Raises StartError."""
    return profile_of(await _status(normalise_url(url, what="profile --live")), engine)


def profile_of(status: Mapping[str, object], engine: str) -> dict[str, object]:
    """A profile from a gateway's status page. Raises StartError."""
    listed = status.get("engines")
    engines = {one["name"]: one for one in listed if isinstance(one, dict)} if isinstance(listed, list) else {}
    found = engines.get(engine)
    if found is None:
        raise StartError(
            f"profile --live {engine}: the gateway has {', '.join(engines) or 'no engines'}; name one of them"
        )
    told = found.get("learned_step")
    if not isinstance(told, dict):
        raise StartError(
            f"profile --live {engine}: nothing was learned of it yet; only sizing policy token_ledger learns, from traffic"
        )
    learned = LearnedStep(**told)
    capacity, seats = found.get("kv_capacity_tokens"), found.get("seats")
    return {
        "model": ", ".join(found.get("models") or ()) or engine,
        "gpu": "not told",
        "step_ms": as_step(of_learned(learned)),
        "engine": {
            "max_num_seqs": int(seats or 256),
            "max_num_batched_tokens": max(2048, int(seats or 256)),
            "kv_tokens": int(capacity or 131_072),
            "lookahead": False,
        },
        "kind": "learned in service",
        "source": f"headrace profile --live {engine} on {datetime.now(UTC).date().isoformat()}",
        "derivation": (
            "prompts and batches of the traffic only"
            + ("" if seats else "; max_num_seqs is not told: 256 assumed")
            + ("" if capacity else "; kv_tokens is not told: 131,072 assumed")
            + "; max_num_batched_tokens is not told: 2,048 assumed"
        ),
        "fitted_on": f"{learned.seen} observations in service, typical error {learned.error:.1%}",
    }


async def _status(url: str) -> Mapping[str, object]:
    pool = EnginePool(EngineAddress("gateway", url))
    try:
        answer = await pool.fetch(b"GET", b"/admin/v1/status")
        document = orjson.loads(answer.body) if answer.status == 200 else None
    except (BackendError, orjson.JSONDecodeError) as error:
        raise StartError(
            f"profile --live {url}: {error}; give the admin listener, e.g. http://127.0.0.1:8081"
        ) from None
    finally:
        await pool.close()
    if not isinstance(document, dict):
        raise StartError(
            f"profile --live {url}: answered {answer.status}; give the admin listener, e.g. http://127.0.0.1:8081"
        )
    return document
