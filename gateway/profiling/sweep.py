"""The measuring of a live engine: prompts alone, batches together, a long prompt beside a decoding stream.

Bounded in time, in batch and in KV memory, and it stops by itself when something goes wrong: an answer fails, the
engine preempts, others use it, first tokens take longer than is bearable. What was seen by then is kept, with the
reason. Nothing is asked of the engine but answers of given lengths; it is idle again a moment after the end, however
the sweep ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, Protocol

from backends.base import BackendError, Probe, Sample, Signal
from backends.gpu.base import GpuSource
from backends.gpu.energy import EnergyMeter
from gateway.load.client import Client, Exchange
from gateway.profiling.observations import Alone, Seen, Stall, Together
from gateway.replay.trace import Request

PROMPTS: Final = (16, 48, 96, 160, 256, 384, 640, 1024, 1536, 2048, 3072, 4096, 8192, 16_384, 32_768)
BATCHES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHORT_TOKENS: Final = 48
LONG_TOKENS: Final = 2048
ANSWER_TOKENS: Final = 64
"""Of a batch: enough for a stretch in which all decode."""
STRETCHES: Final = 4
UNEVEN: Final = 1.5
"""Stretches of one batch that differ by so much are measured once more, and the more even ones kept."""
BUNCH_S: Final = 0.0002
KV_SHARE: Final = 0.85
"""Of the KV memory that a batch may fill, where its size is known."""
IDLE_LOOKS: Final = 3
LOOK_S: Final = 0.5
SETTLE_S: Final = 10.0
SETTLE_LOOK_S: Final = 0.1
LEARN_WORDS: Final = 12
"""A prompt of so many words shows how many tokens of the engine a word is."""
OVERHEAD_TOKENS: Final = 32
"""Kept free of the context length for what a chat template adds."""


class Engine(Protocol):
    """What is asked of an adapter."""

    async def sample(self) -> Sample: ...

    async def probe(self) -> Probe: ...


class Busy(Exception):
    """Others use the engine."""


class Harm(Exception):
    """Going on would hurt; what was seen is kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a sweep goes.

    for_s              begins nothing new after so long
    ttft_max_s         a first token that takes longer ends it
    even_if_busy       measure an engine that others use
    """

    for_s: float = 300.0
    batch_max: int = 256
    prompt_tokens_max: int = 16_384
    ttft_max_s: float = 30.0
    even_if_busy: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine says of itself, and what the sweep met. None: unknown.

    seats        told, or the most that decoded together while one more was asked for
    stopped      why the sweep ended before it was through; "" if it was
    idle_power_w of the GPUs while nothing ran; vram: of the tightest card at the largest batch, of its memory
    """

    kv_tokens: int | None = None
    seats: int | None = None
    max_model_len: int | None = None
    lookahead: bool | None = None
    stopped: str = ""
    took_s: float = 0.0
    idle_power_w: float | None = None
    vram_free_fraction: float | None = None


class Sweep:
    """One sweep of one engine. on_progress: told of what is done now, and of which part of the whole that is."""

    def __init__(
        self,
        client: Client,
        engine: Engine,
        bounds: Bounds,
        *,
        gpu: GpuSource | None = None,
        on_progress: Callable[[str, float], None] = lambda _text, _share: None,
    ) -> None:
        self._client = client
        self._engine = engine
        self._bounds = bounds
        self._gpu = gpu
        self._on_progress = on_progress
        self._clock = client.clock
        self._began_s = client.clock()
        self._alone: list[Alone] = []
        self._together: list[Together] = []
        self._stalls: list[Stall] = []
        self._tokens_per_word = 1.0
        self._kv_tokens: int | None = None
        self._seats: int | None = None
        self._max_model_len: int | None = None
        self._lookahead: bool | None = None
        self._idle_power_w: float | None = None
        self._vram_free: float | None = None

    async def run(self) -> tuple[Seen, Facts]:
        """Measure. Raises Busy before anything was sent, or BackendError of an engine that does not answer."""
        await self._look_first()
        stopped = ""
        try:
            await self._prompts_alone()
            await self._batches(SHORT_TOKENS, self._batches_to_try(), 0.35, 0.7)
            await self._batches(self._long_tokens(), self._batches_to_try()[::2], 0.7, 0.9)
            await self._stall()
            await self._planning()
        except Harm as harm:
            stopped = str(harm)
        self._client.give_up_all("cut")
        self._on_progress("done", 1.0)
        facts = Facts(
            kv_tokens=self._kv_tokens,
            seats=self._seats,
            max_model_len=self._max_model_len,
            lookahead=self._lookahead,
            stopped=stopped,
            took_s=self._clock() - self._began_s,
            idle_power_w=self._idle_power_w,
            vram_free_fraction=self._vram_free,
        )
        return Seen(tuple(self._alone), tuple(self._together), tuple(self._stalls)), facts

    # -- before anything is sent -----------------------------------------------------------------------------------

    async def _look_first(self) -> None:
        probe = await self._engine.probe()
        if not probe.ready:
            raise BackendError(probe.detail or "the engine is not ready")
        self._max_model_len = next((card.max_model_len for card in probe.models if card.max_model_len), None)
        meter = EnergyMeter()
        before: Sample | None = None
        for _ in range(IDLE_LOOKS):
            sample = await self._engine.sample()
            if not self._bounds.even_if_busy and (why := _busy(before, sample)):
                raise Busy(why)
            before = sample
            self._kv_tokens = _whole(sample.value(Signal.KV_CAPACITY_TOKENS)) or self._kv_tokens
            self._seats = _whole(sample.value(Signal.SEATS)) or self._seats
            if self._gpu is not None:
                read = await self._gpu.read()
                meter.add(read.cards, read.taken_s, busy=False)
            await asyncio.sleep(LOOK_S)
        self._idle_power_w = meter.total.idle_power_w

    # -- what is measured ------------------------------------------------------------------------------------------

    async def _prompts_alone(self) -> None:
        tokens_max = min(self._bounds.prompt_tokens_max, self._room(1))
        sizes = [tokens for tokens in PROMPTS if tokens <= tokens_max]
        if sizes and sizes[-1] < 0.8 * tokens_max and tokens_max > LONG_TOKENS:
            sizes.append(tokens_max)
        for at, tokens in enumerate(sizes):
            self._tell(f"prompt of {tokens:,} tokens, alone", 0.35 * at / len(sizes))
            if at > 3 and self._spent > 0.4:
                break
            times: list[Alone] = []
            for _ in range(3 if tokens <= LONG_TOKENS else 2):
                one = await self._one(tokens, 1)
                times.append(Alone(one.prompt_tokens, _first_s(one)))
            self._alone.append(
                Alone(round(median(one.prompt_tokens for one in times)), median(one.seconds for one in times))
            )

    def _batches_to_try(self) -> Sequence[int]:
        most = min(self._bounds.batch_max, self._seats or self._bounds.batch_max)
        tried = [batch for batch in BATCHES if batch < most]
        return [*tried, most]

    def _long_tokens(self) -> int:
        """A prompt long enough for its context to show, short enough for several of them."""
        return max(4 * SHORT_TOKENS, min(LONG_TOKENS, self._room(4), self._bounds.prompt_tokens_max))

    async def _batches(self, prompt_tokens: int, batches: Sequence[int], from_share: float, to_share: float) -> None:
        for at, batch in enumerate(batches):
            needed = batch * (prompt_tokens + ANSWER_TOKENS + batch // 2 + OVERHEAD_TOKENS)
            if self._kv_tokens is not None and needed > KV_SHARE * self._kv_tokens:
                return
            if at > 2 and self._spent > to_share:
                return
            self._tell(
                f"batch of {batch} with prompts of {prompt_tokens:,}",
                from_share + (to_share - from_share) * at / len(batches),
            )
            found = await self._batch(batch, prompt_tokens)
            if found is None and batch > 1:
                return  # they did not decode together: more makes no sense
            if found is not None and not _even(found) and self._spent < to_share:
                again = await self._batch(batch, prompt_tokens) or found
                found = min((one for one in (found, again) if one), key=_spread, default=[])
            self._together.extend(found or ())

    async def _batch(self, batch: int, prompt_tokens: int) -> list[Together] | None:
        """Measure one batch; None when it did not decode together."""
        before = await self._engine.sample()
        meter = EnergyMeter()
        answer_tokens = ANSWER_TOKENS + batch // 2  # they begin one after another
        exchanges = [self._send(prompt_tokens, answer_tokens) for _ in range(batch)]
        running, held_back = 0.0, None
        while any(one.first_s is None and not one.failure for one in exchanges) and self._client.under_way:
            await asyncio.sleep(SETTLE_LOOK_S)
            self._bearable(exchanges)
            sample = await self._engine.sample()
            running = max(running, sample.value(Signal.RUNNING) or 0.0)
            waiting = sample.value(Signal.WAITING)
            held_back = held_back if waiting is None else bool(held_back) or waiting > 0
        await self._watch_power(meter, exchanges)
        await self._client.idle.wait()
        self._whole(exchanges)
        after = await self._engine.sample()
        preempted = _grown(before, after, Signal.PREEMPTIONS_TOTAL)
        if preempted:
            self._kv_tokens = self._kv_tokens or batch * (prompt_tokens + answer_tokens)
            raise Harm(f"the engine preempted {preempted:.0f} times at a batch of {batch}: its KV memory is full")
        begin_s = max(one.marks[0][0] for one in exchanges if one.marks)
        end_s = min(one.marks[-1][0] for one in exchanges if one.marks)
        power_w = meter.total.busy_j / meter.total.busy_s if meter.total.busy_s else None
        together = _together(exchanges, begin_s, end_s, power_w)
        if together is None and batch > 1 and held_back is not False:
            self._seats = self._seats or _whole(running) or _most_at_once(exchanges)
        return together

    async def _watch_power(self, meter: EnergyMeter, exchanges: Sequence[Exchange]) -> None:
        """Read the GPUs while a batch decodes, all the way."""
        while self._gpu is not None and all(not one.ended for one in exchanges):
            read = await self._gpu.read()
            meter.add(read.cards, read.taken_s, busy=True)
            free = read.values.get(Signal.GPU_MEMORY_FREE_FRACTION)
            if free is not None and free.value is not None:
                self._vram_free = min(free.value, 1.0 if self._vram_free is None else self._vram_free)
            await asyncio.sleep(SETTLE_LOOK_S)

    async def _stall(self) -> None:
        """How long a decoding stream stands still while a long prompt is computed: the longest chunk."""
        tokens = min(self._bounds.prompt_tokens_max, max(one.prompt_tokens for one in self._alone))
        self._tell(f"prompt of {tokens:,} tokens beside a stream", 0.92)
        if tokens < 1024 or (self._seats or 2) < 2:
            return
        answer = min(4096, self._room(1) - SHORT_TOKENS)
        stream = self._send(SHORT_TOKENS, answer)
        await self._shows(stream, 8)
        prompt = await self._one(tokens, 1)
        await self._shows(stream, stream.tokens + 4)
        marks = list(stream.marks or ())
        stream.give_up("cut")
        gaps = [(later[0] - earlier[0], later[0]) for earlier, later in pairwise(marks)]
        usual_s = median(gap for gap, _ in gaps)
        longest_s = max((gap for gap, at_s in gaps if at_s >= prompt.sent_s), default=usual_s)
        context = stream.prompt_tokens + stream.tokens
        if longest_s > 1.5 * usual_s:
            self._stalls.append(Stall(prompt.prompt_tokens, context, longest_s, usual_s))
        await self._settled()

    async def _planning(self) -> None:
        """Whether steps are planned one ahead: a short prompt beside a decoding stream then waits a step more."""
        if not self._together or not self._alone or (self._seats or 2) < 2:
            return
        self._tell("short prompts beside a stream", 0.96)
        stream = self._send(SHORT_TOKENS, min(2048, self._room(1) // 2))
        await self._shows(stream, 4)
        shortest = min(self._alone, key=lambda one: one.prompt_tokens)
        step_s = min(self._together, key=lambda one: one.batch).seconds
        waits: list[float] = []
        for number in range(12):
            await asyncio.sleep(step_s * (1 + (number * 0.381966) % 1))
            one = await self._one(shortest.prompt_tokens, 1)
            waits.append((_first_s(one) - shortest.seconds) / step_s)
        stream.give_up("cut")
        self._lookahead = sum(waits) / len(waits) > 1.0
        await self._settled()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _send(self, prompt_tokens: int, output_tokens: int) -> Exchange:
        """Ask for a prompt of so many of the engine's tokens, as far as its tokenizer is known by now."""
        words = max(1, round(prompt_tokens / self._tokens_per_word))
        return self._client.send(Request(0.0, words, output_tokens), self._clock(), marked=True)

    async def _one(self, prompt_tokens: int, output_tokens: int) -> Exchange:
        exchange = self._send(prompt_tokens, output_tokens)
        while not exchange.ended:
            await asyncio.sleep(0.002)
            self._bearable([exchange])
        self._whole([exchange])
        if exchange.request.prompt_tokens >= LEARN_WORDS:
            self._tokens_per_word = exchange.prompt_tokens / exchange.request.prompt_tokens
        return exchange

    async def _shows(self, stream: Exchange, tokens: int) -> None:
        while stream.tokens < tokens and not stream.ended:
            await asyncio.sleep(0.005)
            self._bearable([stream])

    async def _settled(self) -> None:
        """Wait until the engine has noticed that a stream was given up."""
        ends_s = self._clock() + SETTLE_S
        while self._clock() < ends_s:
            running = (await self._engine.sample()).value(Signal.RUNNING)
            if not running:
                return
            await asyncio.sleep(SETTLE_LOOK_S)

    def _room(self, sequences: int) -> int:
        """Prompt tokens that each of so many sequences may have."""
        bounds = [self._bounds.prompt_tokens_max + ANSWER_TOKENS + OVERHEAD_TOKENS]
        if self._max_model_len is not None:
            bounds.append(self._max_model_len)
        if self._kv_tokens is not None:
            bounds.append(int(KV_SHARE * self._kv_tokens / sequences))
        return max(1, min(bounds) - ANSWER_TOKENS - OVERHEAD_TOKENS)

    def _bearable(self, exchanges: Sequence[Exchange]) -> None:
        now_s = self._clock()
        late = [one for one in exchanges if one.first_s is None and now_s - one.sent_s > self._bounds.ttft_max_s]
        if late:
            raise Harm(
                f"{len(late)} first tokens took more than {self._bounds.ttft_max_s:g} s: the engine is at its limit"
            )

    def _whole(self, exchanges: Sequence[Exchange]) -> None:
        broken = next((one for one in exchanges if one.failure), None)
        if broken is not None:
            raise Harm(f"an answer failed ({broken.failure}): {broken.detail or 'no detail'}")
        foreign = [one for one in exchanges if not one.tokens]
        if foreign:
            raise Harm("an answer had no tokens: the engine ends answers at once; is ignore_eos honoured?")

    @property
    def _spent(self) -> float:
        """Of the time allowed."""
        return (self._clock() - self._began_s) / self._bounds.for_s

    def _tell(self, text: str, share: float) -> None:
        if self._spent > 1:
            raise Harm(f"the time allowed ({self._bounds.for_s:g} s) is over")
        self._on_progress(text, share)

    def __repr__(self) -> str:
        return f"<Sweep {len(self._alone)} prompts, {len(self._together)} stretches>"


def _first_s(one: Exchange) -> float:
    """To the first token of an answer of one token; to its end where that token shows no text (half a character)."""
    return one.total_s if one.ttft_s is None else one.ttft_s


def _spread(found: Sequence[Together]) -> float:
    """How uneven the stretches are: the longest step over the shortest."""
    times_s = [one.seconds for one in found]
    return max(times_s) / min(times_s)


def _even(found: Sequence[Together]) -> bool:
    return bool(found) and _spread(found) <= UNEVEN


def _bunched(marks: Sequence[tuple[float, int]]) -> bool:
    """True for tokens that came in few reads: somebody on the way had no time, and when they were made is not known."""
    apart = sum(later[0] - earlier[0] >= BUNCH_S for earlier, later in pairwise(marks))
    return apart < len(marks) / 4


def _together(
    exchanges: Sequence[Exchange], begin_s: float, end_s: float, power_w: float | None
) -> list[Together] | None:
    """The mean steps of the time in which all decoded, in stretches, those left out in which tokens came in bunches.

    None when there was no such time to speak of.
    """
    found: list[Together] = []
    batch = len(exchanges)
    marks = [[mark for mark in one.marks or () if begin_s <= mark[0] <= end_s] for one in exchanges]
    if min(map(len, marks)) < 2 * STRETCHES:
        return None
    for number in range(STRETCHES):
        steps: list[float] = []
        context = 0.0
        for one, mine in zip(exchanges, marks, strict=True):
            first = mine[number * (len(mine) - 1) // STRETCHES]
            last = mine[(number + 1) * (len(mine) - 1) // STRETCHES]
            per_mark = one.tokens / one.marks[-1][1] if one.marks else 1.0  # an event may hold several
            steps.append((last[0] - first[0]) / (per_mark * (last[1] - first[1])))
            context += one.prompt_tokens + per_mark * (first[1] + last[1] - 1) / 2
        if not all(map(_bunched, marks)):
            found.append(Together(batch, context, median(steps), power_w))
    return found


def _most_at_once(exchanges: Sequence[Exchange]) -> int | None:
    """The most that had begun and not ended at one time."""
    edges = sorted(
        edge for one in exchanges if one.first_s is not None for edge in ((one.first_s, 1), (one.last_s, -1))
    )
    level = most = 0
    for _, step in edges:
        level += step
        most = max(most, level)
    return most or None


def _busy(before: Sample | None, sample: Sample) -> str:
    """Why an engine that we have sent nothing is not idle; "" when nothing says so."""
    running, waiting = sample.value(Signal.RUNNING), sample.value(Signal.WAITING)
    if running or waiting:
        return f"it runs {running or 0:.0f} and has {waiting or 0:.0f} waiting"
    grown = 0.0 if before is None else _grown(before, sample, Signal.GENERATION_TOKENS_TOTAL)
    return f"it made {grown:.0f} tokens while nothing was sent to it" if grown else ""


def _grown(before: Sample, after: Sample, signal: Signal) -> float:
    """By how much a counter grew; 0 where it is not told."""
    old, new = before.value(signal), after.value(signal)
    return 0.0 if old is None or new is None else max(0.0, new - old)


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)
