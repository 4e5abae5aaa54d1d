"""The driver on a clock that moves only when told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from backends.simulated.driver import Driver
from backends.simulated.profiles import EngineOptions, build_engine, load_profile
from backends.simulated.sequence import Sequence, SequenceState


@dataclass(order=True)
class Timer:
    when_s: float
    number: int
    callback: Callable[[], object] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class VirtualLoop:
    """The three things a driver needs of a loop, on a clock that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []
        self._due: list[Timer] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[[], object], /) -> Timer:
        return self.call_at(self.now_s, callback)

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        timer = Timer(when, len(self.timers), callback)
        self.timers.append(timer)
        self._due.append(timer)
        return timer

    def run_until(self, until_s: float) -> None:
        while self._due and min(self._due).when_s <= until_s:
            timer = min(self._due)
            self._due.remove(timer)
            self.now_s = max(self.now_s, timer.when_s)
            if not timer.cancelled:
                timer.callback()
        self.now_s = max(self.now_s, until_s)


class Follower:
    """Notes when the loop told it of how many tokens."""

    def __init__(self, loop: VirtualLoop, name: str, *, prompt: int = 50, output: int = 20) -> None:
        self.sequence = Sequence(name, prompt_tokens=prompt, output_tokens=output)
        self.seen: list[tuple[float, int]] = []
        self.finished_at_s: list[float] = []
        self._loop = loop

    def on_step(self) -> None:
        self.seen.append((self._loop.now_s, self.sequence.generated_tokens))

    def on_finished(self) -> None:
        self.finished_at_s.append(self._loop.now_s)


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


def new_driver(loop: VirtualLoop, *, speed: float = 1.0, seats: int = 64) -> Driver:
    engine = build_engine(load_profile("h100_llama31_8b_tp1"), EngineOptions(max_num_seqs=seats))
    return Driver(engine, loop, speed=speed)


def test_a_listener_is_told_of_each_token_when_its_step_ends(loop: VirtualLoop) -> None:
    driver = new_driver(loop)
    follower = Follower(loop, "one")

    driver.submit(follower)
    loop.run_until(200.0)

    assert [tokens for _, tokens in follower.seen] == list(range(1, 20))
    assert follower.seen[0][0] == pytest.approx(100 + follower.sequence.first_token_s)
    assert follower.finished_at_s == [pytest.approx(100 + follower.sequence.finished_s)]


def test_many_streams_cost_one_timer_per_engine_step(loop: VirtualLoop) -> None:
    driver = new_driver(loop)
    followers = [Follower(loop, str(number)) for number in range(50)]

    for follower in followers:
        driver.submit(follower)
    loop.run_until(200.0)

    assert all(follower.finished_at_s for follower in followers)
    assert len(loop.timers) <= driver.engine.totals.steps + 2


def test_speed_lets_engine_time_run_faster_than_the_loop(loop: VirtualLoop) -> None:
    driver = new_driver(loop, speed=10)
    follower = Follower(loop, "one")

    driver.submit(follower)
    loop.run_until(200.0)

    assert follower.finished_at_s == [pytest.approx(100 + follower.sequence.finished_s / 10)]


def test_a_late_loop_tells_several_tokens_at_once(loop: VirtualLoop) -> None:
    driver = new_driver(loop)
    follower = Follower(loop, "one")
    driver.submit(follower)
    loop.run_until(100.02)

    loop.now_s = 100.1
    loop.run_until(100.1)

    assert follower.seen[-1][1] - follower.seen[-2][1] > 5


def test_an_aborted_sequence_is_told_nothing_more(loop: VirtualLoop) -> None:
    driver = new_driver(loop)
    leaving, staying = Follower(loop, "leaving", output=500), Follower(loop, "staying", output=500)
    driver.submit(leaving)
    driver.submit(staying)
    loop.run_until(100.5)
    told = len(leaving.seen)

    driver.abort(leaving.sequence)
    driver.abort(leaving.sequence)
    loop.run_until(110.0)

    assert len(leaving.seen) == told
    assert leaving.finished_at_s == []
    assert staying.finished_at_s
    assert driver.engine.scheduler.running == 0


def test_a_frozen_engine_shows_nothing_and_goes_on_where_it_stopped(loop: VirtualLoop) -> None:
    driver = new_driver(loop)
    running, late = Follower(loop, "running", output=100), Follower(loop, "late")
    driver.submit(running)
    loop.run_until(100.2)
    before = running.seen[-1][1]

    driver.freeze()
    driver.submit(late)
    loop.run_until(160.2)

    assert running.seen[-1][1] == before
    assert (driver.engine.scheduler.running, driver.engine.scheduler.waiting) == (1, 0)

    driver.thaw()
    loop.run_until(200.0)

    assert running.finished_at_s == [pytest.approx(160 + running.sequence.finished_s)]
    assert late.finished_at_s


def test_a_sequence_aborted_while_the_engine_is_frozen_never_runs(loop: VirtualLoop) -> None:
    driver = new_driver(loop)
    follower = Follower(loop, "one")
    driver.freeze()
    driver.submit(follower)

    driver.abort(follower.sequence)
    driver.thaw()
    loop.run_until(200.0)

    assert follower.sequence.state is SequenceState.ABORTED
    assert driver.engine.totals.steps == 0
