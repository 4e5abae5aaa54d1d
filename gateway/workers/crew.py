"""The supervisor's processes: kept running, replaced one by one, drained together.

    a process dies          the next one starts in its place; after a pause when it had not lived for steady_s, doubled
                            each time and jittered, so that a fault neither spins nor beats in step
    it leaves by itself     (a signal to it): the next one starts at once, while it finishes what it runs
    roll                    new first: only when the new one serves does the old one retire; a new one that does not
                            come up changes nothing
    it is silent            for frozen_s: killed, since its clients wait for nothing

The first place is the one that the others need: it is filled before them and emptied after them.

Before all have served once, a process that ends ends the whole (`ProcessRefused`): it has met an operator's mistake,
which a restart would only repeat.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.logs import Log
from gateway.workers.child import Child

DIED, LEFT, RELOAD = "died", "left", "reload"
"""Why a process was replaced."""


class ProcessRefused(Exception):
    """A process ended before it served. It has told why on standard error; exit_code is its own, None: not started."""

    def __init__(self, name: str, exit_code: int | None) -> None:
        super().__init__(f"process {name} ended with {exit_code} at its start: expected it to serve; see what it wrote")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class CrewTimes:
    """How patient a crew is.

    pause_s   before a restart after the first early death; doubled up to pause_max_s, then jittered by a half
    start_s   for a new process to serve
    end_s     for a process to end once told to hurry
    """

    steady_s: float = 10.0
    pause_s: float = 0.2
    pause_max_s: float = 10.0
    start_s: float = 60.0
    frozen_s: float = 30.0
    look_s: float = 1.0
    end_s: float = 3.0


class Place:
    """Where one process runs: the present one (once started), whether any has served here, early deaths in a row."""

    __slots__ = ("child", "early_deaths", "name", "served")

    def __init__(self, name: str) -> None:
        self.name = name
        self.child: Child | None = None
        self.served = asyncio.Event()
        self.early_deaths = 0

    def __repr__(self) -> str:
        return f"<Place {self.name} {self.child!r}>"


class Crew:
    """See the module header. `run` lasts until `drain` or `hurry` has ended every process.

    places     in the order of a roll
    children   every process there is, those that leave too
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[str], Child],
        *,
        rng: random.Random,
        log: Log,
        on_ended: Callable[[Child], Awaitable[None]],
        on_replaced: Callable[[str, str], None],
        times: CrewTimes | None = None,
    ) -> None:
        """make: a new process for a place. on_ended: settle what one leaves behind. on_replaced: place and reason."""
        self.places = [Place(name) for name in names]
        self.children: list[Child] = []
        self._make = make
        self._rng = rng
        self._log = log
        self._on_ended = on_ended
        self._on_replaced = on_replaced
        self._times = times or CrewTimes()
        self._group = asyncio.TaskGroup()
        self._stopping = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()

    async def run(self) -> None:
        """Keep every place filled. Raises ProcessRefused, in a group."""
        async with self._group:
            watch = self._group.create_task(self._kill_frozen(), name="frozen processes")
            first, *others = self.places
            await self._first_start([first])
            await self._first_start(others)
            await self._stopping.wait()
            await self._nobody.wait()
            watch.cancel()

    async def served(self) -> None:
        """Wait until each place has served."""
        for place in self.places:
            await place.served.wait()

    async def tell(self, within_s: float) -> None:
        """Have every process that has begun to report do so in full; a slow one keeps nobody longer than this."""
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(child.tell()) for child in self.children if child.heard]
            if asked:
                await asyncio.wait(asked, timeout=within_s)
            for task in asked:
                task.cancel()

    async def roll(self) -> bool:
        """Replace every process, one after the other, without ever having fewer. False: stopped at one that failed."""
        for place in self.places:
            if self._stopping.is_set():
                return False
            new = self._start(place)
            if not await self._comes_up(new):
                self._log.error("new process does not serve, the old ones stay", process=place.name, pid=new.pid)
                new.kill()
                return False
            old, place.child, place.early_deaths = place.child, new, 0
            self._on_replaced(place.name, RELOAD)
            if old is not None:
                old.retire()
        return True

    async def drain(self, within_s: float) -> None:
        """Let all finish what they run, the first place last, and end; those that need longer are made to."""
        self._stopping.set()
        try:
            async with asyncio.timeout(within_s + self._times.end_s):
                await self._drain()
        except TimeoutError:
            await self.hurry()

    async def _drain(self) -> None:
        needed = self.places[0].name
        others = [child for child in self.children if child.name != needed]
        for leaving in (others, self.children):
            for child in leaving:
                child.drain()
            for child in list(leaving):
                await child.ended.wait()

    async def hurry(self) -> None:
        """Have all end now, and make them where they do not."""
        self._stopping.set()
        for child in self.children:
            child.hurry()
        try:
            async with asyncio.timeout(self._times.end_s):
                await self._nobody.wait()
        except TimeoutError:
            for child in self.children:
                child.kill()
            await self._nobody.wait()

    # -- one place -------------------------------------------------------------------------------------------------

    async def _first_start(self, places: Sequence[Place]) -> None:
        for place in () if self._stopping.is_set() else places:
            place.child = self._start(place)
            self._group.create_task(self._keep(place), name=f"keep {place.name}")
        for place in places:
            await _first(place.served, self._stopping)

    def _start(self, place: Place) -> Child:
        child = self._make(place.name)
        self.children.append(child)
        self._nobody.clear()
        self._group.create_task(self._live(place, child), name=f"process {place.name}")
        return child

    async def _live(self, place: Place, child: Child) -> None:
        """All of one process's life, and what it leaves behind."""
        try:
            async with asyncio.TaskGroup() as group:
                noting = group.create_task(_note(child.up, place.served))
                await child.run()
                noting.cancel()
        except* Exception as error:
            # It could not be started, or said what nobody understands: it is gone, and the others are not its business.
            self._log.error("process failed", process=place.name, pid=child.pid, reason=str(error.exceptions[0]))
        finally:
            self.children.remove(child)
            if not self.children:
                self._nobody.set()
        await self._on_ended(child)

    async def _keep(self, place: Place) -> None:
        while not self._stopping.is_set():
            child = place.child
            assert child is not None
            await child.leaving.wait()
            if place.child is not child or self._stopping.is_set():
                continue
            reason, pause_s = LEFT, 0.0
            if child.ended.is_set():
                if not all(one.served.is_set() for one in self.places):
                    raise ProcessRefused(place.name, child.exit_code)
                reason, pause_s = DIED, self._pause_s(place, child)
            await self._sleep(pause_s)
            if place.child is child and not self._stopping.is_set():
                place.child = self._start(place)
                self._on_replaced(place.name, reason)

    def _pause_s(self, place: Place, child: Child) -> float:
        times = self._times
        place.early_deaths = 0 if child.lived_s >= times.steady_s else place.early_deaths + 1
        pause_s = 0.0
        if place.early_deaths:
            doubled_s = min(times.pause_max_s, times.pause_s * 2 ** (place.early_deaths - 1))
            pause_s = doubled_s * self._rng.uniform(0.5, 1.0)
        self._log.error(
            "process died",
            process=place.name,
            pid=child.pid,
            exit_code=child.exit_code,
            lived_s=round(child.lived_s, 1),
            next_in_s=round(pause_s, 2),
        )
        return pause_s

    async def _sleep(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _comes_up(self, child: Child) -> bool:
        try:
            async with asyncio.timeout(self._times.start_s):
                await _first(child.up, child.ended)
        except TimeoutError:
            return False
        return child.up.is_set() and not child.ended.is_set()

    async def _kill_frozen(self) -> None:
        """Counts looks, not time: after a pause of this very process nobody is taken for frozen."""
        times = self._times
        silent: dict[Child, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(times.look_s)
            for child in self.children:
                heard, looks = silent.get(child, (-1, 0))
                looks = looks + 1 if heard == child.heard else 0
                silent[child] = (child.heard, looks)
                if looks * times.look_s >= (times.frozen_s if child.up.is_set() else times.start_s):
                    self._log.error("process is frozen and is killed", process=child.name, pid=child.pid)
                    child.kill()
            silent = {child: seen for child, seen in silent.items() if child in self.children}

    def __repr__(self) -> str:
        return f"<Crew {' '.join(map(repr, self.children))}>"


async def _note(event: asyncio.Event, then: asyncio.Event) -> None:
    await event.wait()
    then.set()


async def _first(*events: asyncio.Event) -> None:
    """Wait for any of them."""
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
