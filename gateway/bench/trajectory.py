"""Where an engine is going, exactly: memory, decoding load and first tokens from now on, for the clairvoyant.

A bulk work may start when all of this holds to the end of its life.

1. *Memory.* The KV tokens of what runs, of the work and of every interactive request still to come stay below KV_MARGIN of
   the engine's, at every end of a sequence until the work's own, since all grow until then; requests to come are looked
   at in POINTS times.
2. *First tokens.* Steps are played on, one by one, behind the work's prompt, with every interactive request that comes,
   until the engine has caught up: all have their first token in time.
3. *Decoding load.* From there on it is bulk's decoding that makes prompts slower: at each of the POINTS by no more than
   what the requests of that time tolerate (`foresight`).
4. *Gaps.* The step with one more sequence, prompts included, is no longer than TPOT_SHARE of the objective.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from itertools import accumulate, pairwise

from backends.simulated.sequence import SequenceState
from gateway.bench.cells import BULK
from gateway.bench.foresight import Coming
from gateway.replay.host import EngineHost
from gateway.replay.trace import Request
from policies.vocabulary import Guard

POINTS = 24
KV_MARGIN = 0.98
FIRST_POINT_S = 0.25
RATIO = 1.38
"""Between one point and the next: 24 points reach five minutes."""
POINTS_S = [0.0, *(FIRST_POINT_S * RATIO**point for point in range(POINTS - 1))]
NEAR = 12
"""Of the points; looked at anew every FIRST_POINT_S, those beyond every FAR_S."""
FAR_S = 2.0
MOST_STEPS = 64
"""Played on: a burst longer than that is judged by its beginning."""
TTFT_MARGIN = 0.9
TPOT_SHARE = 0.8
"""Of the objective on gaps: answers differ around the mean of a moment."""
SPARE_STEPS = 1.2
"""Times the steps of now that the rest of a run may have: they become shorter where others end."""
HALF_BLOCK_TOKENS = 8
_WHATEVER_THE_SIZE = frozenset({Guard.SEATS, Guard.TPOT})
_BY_ITS_LIFE = frozenset({Guard.KV, Guard.STALL})


class Arrivals:
    """What is to come at one engine, and what memory it will hold at each of POINTS_S."""

    def __init__(self, coming: Coming) -> None:
        self.coming = coming
        self._held = [0.0] * POINTS
        self._looked_s = [-math.inf, -math.inf]

    def held(self, now_s: float, step_s: float) -> list[float]:
        """KV tokens at each of POINTS_S from now, of requests yet to arrive, when a step takes step_s."""
        for part, (first, last, every_s) in enumerate(((0, NEAR, FIRST_POINT_S), (NEAR, POINTS, FAR_S))):
            if now_s - self._looked_s[part] >= every_s:
                self._looked_s[part] = now_s
                self._held[first:last] = self._look(now_s, step_s, first, last)
        return self._held

    def _look(self, now_s: float, step_s: float, first: int, last: int) -> list[float]:
        held = [0.0] * POINTS
        coming = self.coming
        for index in range(coming.after(now_s), coming.after(now_s + POINTS_S[last - 1])):
            one = coming.known[index]
            since_s = one.arrival_s - now_s
            until_s = since_s + one.output_tokens * step_s
            prompt = one.prompt_tokens + HALF_BLOCK_TOKENS
            at = bisect_left(POINTS_S, since_s, first)
            while at < last and POINTS_S[at] < until_s:
                held[at] += prompt + (POINTS_S[at] - since_s) / step_s
                at += 1
        return held[first:last]


class Trajectory:
    """See the module header. As of one moment; `add` takes in what will start now as well."""

    def __init__(
        self,
        arrivals: Arrivals,
        host: EngineHost,
        *,
        now_s: float,
        until_s: float | None,
        tpot_sla_s: float,
        lately_s: float,
        burst_part: float,
        is_bulk: Callable[[str], bool],
    ) -> None:
        """Of an engine as it is.

        until_s    when bulk's part of the run is over; None: never before its end
        lately_s   what a step took on average of late
        burst_part how full a burst's steps are taken to be, of the batch budget: the less, the more bulk slows them
        is_bulk    of a sequence, by its id
        """
        self._arrivals, self._coming = arrivals, arrivals.coming
        self._model, self._limits = host.spec.profile.step_model, host.scheduler.limits
        self._lookahead = host.spec.profile.lookahead
        self._now_s, self._step_left_s, self._tpot_sla_s = now_s, host.step_left_s(), tpot_sla_s
        self._burst_tokens = int(burst_part * self._limits.max_num_batched_tokens)
        self._capacity = KV_MARGIN * self._limits.usable_blocks * self._limits.block_tokens
        self._ends: list[tuple[int, int]] = []
        self._bulk_ends: list[tuple[int, int]] = []
        self._pending: list[tuple[int, int]] = []
        for sequence in host.sequences:
            held = sequence.kv_tokens
            if not sequence.decoding:
                target = sequence.prefill_target_tokens
                if sequence.state is SequenceState.WAITING or held < target:
                    cached = max(held, min(sequence.cached_prompt_tokens, target - 1))
                    self._pending.append((target - cached, cached))
                held = target
            end = (sequence.output_tokens - sequence.generated_tokens, held + HALF_BLOCK_TOKENS)
            self._ends.append(end)
            if is_bulk(sequence.id):
                self._bulk_ends.append(end)
        self._ends.sort()
        self._bulk_ends.sort()
        self._refused: list[tuple[int, int, Guard]] = []
        self._tolerated: list[float] | None = None
        self._derive()
        self._step_s = max(self._mean_step_s(), lately_s)
        # prompts make steps of now long, and may be over soon: what is left may be all decoding
        decode_s = self._model.step_s(max(1, self._decoding), self._context)
        self._left_steps = math.inf if until_s is None else SPARE_STEPS * max(0.0, until_s - now_s) / decode_s
        coming = arrivals.held(now_s, self._step_s)
        # what is to come holds at a time what it holds at the points around it at most
        self._coming_held = [max(coming[max(0, at - 1)], coming[at]) for at in range(POINTS)]

    def add(self, request: Request) -> None:
        """Somebody starts here now."""
        cached = min(request.cached_prompt_tokens, request.prompt_tokens - 1)
        end = (request.output_tokens, request.prompt_tokens + HALF_BLOCK_TOKENS)
        self._pending.append((request.prompt_tokens - cached, cached))
        insort(self._ends, end)
        if request.class_name == BULK:
            insort(self._bulk_ends, end)
        self._derive()

    def judge(self, request: Request) -> Guard:
        """What keeps a bulk request from starting now; NONE when nothing does. What was refused once refuses all that is
        no smaller, for `add` leaves less room."""
        for prompt_tokens, output_tokens, guard in self._refused:
            if request.prompt_tokens >= prompt_tokens and request.output_tokens >= output_tokens:
                return guard
        guard = self._look(request)
        if guard is not Guard.NONE:
            prompt_tokens = 0 if guard in _WHATEVER_THE_SIZE else request.prompt_tokens
            output_tokens = request.output_tokens if guard in _BY_ITS_LIFE else 0
            self._refused.append((prompt_tokens, output_tokens, guard))
        return guard

    def _look(self, request: Request) -> Guard:
        if self._decoding + 1 >= self._limits.max_num_seqs:
            return Guard.SEATS
        if self._step_s > TPOT_SHARE * self._tpot_sla_s:
            return Guard.TPOT
        if not self._memory_lasts(request):
            return Guard.KV
        if not self._load_is_tolerated(request):
            return Guard.STALL
        if not self._first_tokens_stay(request):
            return Guard.TTFT
        return Guard.NONE

    # -- what is made once ---------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        self._steps = [left for left, _ in self._ends]
        self._held_from = _from_the_end(self._ends)
        self._bulk_steps = [left for left, _ in self._bulk_ends]
        self._bulk_held_from = _from_the_end(self._bulk_ends)
        self._decoding, self._context = len(self._ends), self._held_from[0]
        self._peaks: list[float] | None = None

    def _mean_step_s(self) -> float:
        """A decode step, stretched by the time that prompts take: those of the next seconds, at their rate."""
        model, coming = self._model, self._coming
        decode_s = model.step_s(max(1, self._decoding), self._context)
        first = coming.after(self._now_s)
        next_ones = coming.known[first : first + 32]
        if len(next_ones) < 2:
            return decode_s
        prompts = sum(one.computed_tokens for one in next_ones)
        over_s = max(1.0, next_ones[-1].arrival_s - self._now_s)
        return decode_s / (1 - min(0.8, prompts * model.e / 1000 / over_s))

    # -- memory --------------------------------------------------------------------------------------------------------

    def _memory_lasts(self, request: Request) -> bool:
        """Memory peaks where a sequence ends: those ends are looked at, and the work's own."""
        last, mine = min(request.output_tokens, self._left_steps), request.prompt_tokens + HALF_BLOCK_TOKENS
        if self._peaks is None:
            self._peaks = self._highest_so_far()
        highest = max(self._peaks[bisect_right(self._steps, last)], self._others_at(last) + last)
        return highest + mine <= self._capacity

    def _highest_so_far(self) -> list[float]:
        """Item i: the most that all others, and one token a step for a newcomer, have held by the i-th end."""
        coming = self._coming_held
        points = [point_s / self._step_s for point_s in POINTS_S[:-1]]
        others = len(self._steps)
        highest = self._held_from[0] + coming[0]
        found = [highest]
        at = 0
        for ended, steps in enumerate(self._steps):
            while at < POINTS - 1 and points[at] < steps:
                at += 1
            highest = max(highest, self._held_from[ended] + (others - ended + 1) * steps + coming[at])
            found.append(highest)
        return found

    def _others_at(self, steps: float) -> float:
        """Tokens that all but a newcomer hold after so many steps, before those that end then have left."""
        first = bisect_left(self._steps, steps)
        at = min(bisect_left(POINTS_S, steps * self._step_s), POINTS - 1)
        return self._held_from[first] + (len(self._steps) - first) * steps + self._coming_held[at]

    # -- decoding load -------------------------------------------------------------------------------------------------

    def _load_is_tolerated(self, request: Request) -> bool:
        """At each point of the work's life bulk makes prompts no slower than those who come then tolerate."""
        if self._tolerated is None:
            self._tolerated = [
                self._coming.tolerated(self._now_s + from_s, self._now_s + until_s)
                for from_s, until_s in pairwise(POINTS_S)
            ]
        life_s = min(request.output_tokens, self._left_steps) * self._step_s
        piece_of_burst = self._burst_tokens
        alone_s = self._model.step_s(0, 0, ((piece_of_burst, 0),))
        for (from_s, until_s), tolerated in zip(pairwise(POINTS_S), self._tolerated, strict=True):
            if tolerated < math.inf:
                steps = from_s / self._step_s
                first = bisect_left(self._bulk_steps, steps)
                bulk = len(self._bulk_steps) - first + 1
                held = self._bulk_held_from[first] + bulk * steps + request.prompt_tokens
                piece = max(1, piece_of_burst - bulk)
                if self._model.step_s(bulk, int(held), ((piece, 0),)) > tolerated * alone_s * piece / piece_of_burst:
                    return False
            if until_s >= life_s:
                return True
        return True

    # -- first tokens --------------------------------------------------------------------------------------------------

    def _first_tokens_stay(self, request: Request) -> bool:
        """Every request that comes before the engine has caught up is in time behind the work."""
        coming, model, budget = self._coming, self._model, self._limits.max_num_batched_tokens
        cached = min(request.cached_prompt_tokens, request.prompt_tokens - 1)
        queue: deque[tuple[int, int, float]] = deque((tokens, before, math.inf) for tokens, before in self._pending)
        queue.append((request.prompt_tokens - cached, cached, math.inf))
        decoding, context = self._decoding - len(self._pending), self._context
        context -= sum(tokens + before for tokens, before in self._pending)
        began_s, at_s = self._now_s, self._now_s + self._step_left_s
        index = coming.after(self._now_s)
        for _ in range(MOST_STEPS):
            seen_s = began_s if self._lookahead else at_s  # planned while the step before it runs, or at its end
            while index < len(coming.known) and coming.times_s[index] <= seen_s:
                one = coming.known[index]
                queue.append((one.computed_tokens, one.cached_tokens, _due_s(one.arrival_s, one.due_s)))
                index += 1
            if not queue and not (index < len(coming.known) and coming.times_s[index] <= at_s):
                return True
            pieces, ended = _fill(queue, budget - decoding)
            began_s = at_s
            at_s += model.step_s(decoding, int(context), pieces)
            if any(at_s > due_s for _, due_s in ended):
                return False
            context += decoding + sum(tokens for tokens, _ in ended)
            decoding += len(ended)
        return True


def _fill(queue: deque[tuple[int, int, float]], budget: int) -> tuple[list[tuple[int, int]], list[tuple[int, float]]]:
    """A step's pieces, (tokens, tokens before), and whose prompts end with it: (prompt tokens, due_s)."""
    pieces: list[tuple[int, int]] = []
    ended: list[tuple[int, float]] = []
    while queue and budget > 0:
        tokens, before, due_s = queue[0]
        piece = min(tokens, budget)
        budget -= piece
        pieces.append((piece, before))
        if piece == tokens:
            queue.popleft()
            ended.append((before + tokens, due_s))
        else:
            queue[0] = (tokens - piece, before + piece, due_s)
    return pieces, ended


def _due_s(arrival_s: float, due_s: float) -> float:
    return due_s if due_s == math.inf else arrival_s + TTFT_MARGIN * (due_s - arrival_s)


def _from_the_end(ends: list[tuple[int, int]]) -> list[int]:
    """Item i: tokens now of those that end i-th or later."""
    return [*accumulate((held for _, held in reversed(ends)), initial=0)][::-1]
