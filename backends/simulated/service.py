"""What both HTTP faces stand on: making answers, keeping track of those under way, ending them all.

Nothing here knows a dialect. A face parses its requests, asks for choices, and renders what comes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from backends.simulated.answer import OutputLengths, find_stop
from backends.simulated.blocks import block_ids
from backends.simulated.config import SimulatedConfig
from backends.simulated.driver import Driver
from backends.simulated.generation import Choice, Generation
from backends.simulated.sequence import Sequence
from backends.simulated.stats import ExchangeStats
from backends.simulated.tokenizer import Tokenizer, shipped_tokenizer


class Service:
    """One engine's answers.

    max_model_len   longest prompt plus answer
    started_s       wall time of the start
    draining        no new work is taken any more
    """

    def __init__(
        self, config: SimulatedConfig, driver: Driver, *, max_model_len: int, wall_s: Callable[[], float]
    ) -> None:
        self.config = config
        self.driver = driver
        self.max_model_len = max_model_len
        self.wall_s = wall_s
        self.started_s = wall_s()
        self.draining = False
        self.stats = ExchangeStats(max_model_len, speed=config.speed)
        self.tokenizer: Tokenizer = shipped_tokenizer()
        self._dice = random.Random(config.seed)
        self._lengths = OutputLengths(config.seed, config.output_median_tokens, config.output_sigma)
        self._live: dict[Generation, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def new_id(self) -> str:
        """Sixteen hexadecimal digits, a different one each time, the same ones for the same seed."""
        return f"{self._dice.getrandbits(64):016x}"

    def choice(
        self,
        index: int,
        prompt_ids: tuple[int, ...],
        *,
        variant: int,
        max_tokens: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        output_tokens: int | None = None,
        stops: tuple[str, ...] = (),
        priority: int = 0,
    ) -> Choice:
        """One answer to be: its true length and why it will end are settled here, known to the engine alone."""
        if output_tokens is not None:
            length = max(1, min(output_tokens, max_tokens))
        elif ignore_eos:
            length = max_tokens
        else:
            length = self._lengths.draw(prompt_ids, variant, at_least=min_tokens, at_most=max_tokens)
        ended_by_model = length < max_tokens or (output_tokens is not None and output_tokens <= max_tokens)
        stop = find_stop(self.tokenizer, prompt_ids, variant, stops, length) if stops else None
        if stop is not None:
            length = stop.tokens
        options = self.config.options
        sequence = Sequence(
            self.new_id(),
            prompt_tokens=len(prompt_ids),
            output_tokens=length,
            max_tokens=max_tokens,
            priority=priority,
            block_ids=block_ids(prompt_ids, options.block_tokens) if options.prefix_caching else (),
        )
        reason = "stop" if stop is not None or ended_by_model else "length"
        return Choice(index, sequence, self.tokenizer, prompt_ids, variant=variant, finish_reason=reason, stop=stop)

    def prefill_backlog_tokens(self) -> int:
        """Whole prompts of all sequences that have shown no token yet."""
        return sum(
            len(choice.prompt_ids)
            for generation in self._live
            for choice in generation.choices
            if not choice.sequence.generated_tokens
        )

    @asynccontextmanager
    async def under_way(self, generation: Generation) -> AsyncIterator[None]:
        """Start a generation and see that it is over when the block is left, however it is left.

        Raises ValueError for one that could never run.
        """
        self._live[generation] = None
        self._idle.clear()
        self.stats.in_flight += 1
        try:
            generation.start()
            yield
        finally:
            generation.close()
            del self._live[generation]
            self.stats.in_flight -= 1
            if not self._live:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no answer is under way."""
        await self._idle.wait()

    def cut_all(self) -> None:
        """End every answer under way with what it has."""
        for generation in list(self._live):
            generation.cut()

    def __repr__(self) -> str:
        return f"<Service {self.config.model} in_flight={self.stats.in_flight} draining={self.draining}>"
