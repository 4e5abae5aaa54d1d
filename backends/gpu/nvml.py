"""NVML: the cards of this host, read in a thread of its own so that no driver ever blocks the loop.

One thread serves all engines of the process, since NVML is one session a process and a driver that hangs hangs for
everyone. A read is bounded: what it has found by then is told, the rest has timed out, and the next read waits for the
same one to end instead of piling up behind it. The thread is a daemon: a call that never returns keeps no process
from ending.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType

from backends.gpu.base import Finding, GpuSample
from backends.gpu.combine import combined
from backends.gpu.devices import visible_devices
from backends.gpu.nvml_cards import NvmlCards, Progress
from backends.gpu.nvml_session import NvmlFault, NvmlSession, NvmlUnavailable

READ_S = 2.0


class NvmlThread:
    """The thread, started by the first read. `load` makes the module pynvml, by default by importing it."""

    def __init__(self, monotonic: Callable[[], float], load: Callable[[], ModuleType] | None = None) -> None:
        self.monotonic = monotonic
        self._session = NvmlSession(monotonic, load)
        self._cards = NvmlCards(self._session, monotonic)
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start_read(self, devices: Sequence[str] | None, progress: Progress) -> asyncio.Future[Exception | None]:
        """Begin to read; what it resolves to is why nothing could be read."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Exception | None] = loop.create_future()

        def settle(outcome: Exception | None) -> None:
            if not ended.done():
                ended.set_result(outcome)

        def read() -> None:
            outcome: Exception | None = None
            try:
                self._cards.read(devices, progress)
            except Exception as error:
                outcome = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, outcome)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
            self._thread.start()
        self._reads.put(read)
        return ended

    def close(self) -> None:
        """Let the thread end after what it does now. Does not wait for it."""
        if self._thread is not None:
            self._reads.put(None)
            self._thread = None

    def _run(self) -> None:
        while (read := self._reads.get()) is not None:
            read()
        self._session.close()

    def __repr__(self) -> str:
        return f"<NvmlThread {self._session!r}>"


class NvmlSource:
    """One engine's cards of this host.

    thread    shared by all sources of the process; its owner closes it
    devices   indices, GPU-<uuid> or MIG-<uuid>; None for what CUDA_VISIBLE_DEVICES leaves, or all
    read_s    bound on one read
    """

    source = "nvml"

    def __init__(self, thread: NvmlThread, devices: Sequence[str] | None = None, *, read_s: float = READ_S) -> None:
        self._thread = thread
        self._devices = visible_devices(os.environ) if devices is None else tuple(devices)
        self._named = devices is not None
        self._read_s = read_s
        self._progress = Progress()
        self._under_way: asyncio.Future[Exception | None] | None = None
        self._began_s = 0.0

    async def read(self) -> GpuSample:
        """See `GpuSource`. One at a time."""
        monotonic = self._thread.monotonic
        if self._under_way is None:
            self._progress = Progress()
            self._began_s = monotonic()
            self._under_way = self._thread.start_read(self._devices, self._progress)
        done, _ = await asyncio.wait([self._under_way], timeout=self._read_s)
        if not done:
            return self._late(monotonic())
        failed = self._under_way.result()
        self._under_way = None
        if failed is not None:
            return self._failed(failed, monotonic())
        cards = self._progress.readings()
        return combined(self.source, monotonic(), cards, () if self._named else _unnamed(len(cards)))

    async def close(self) -> None:
        """The thread is closed by its owner."""

    def _late(self, now_s: float) -> GpuSample:
        slow = Finding("nvml_slow", f"NVML has not answered for {now_s - self._began_s:.1f} s; see the driver's log")
        cards = self._progress.readings()
        if any(card.values for card in cards):
            return combined(self.source, now_s, cards, (slow,))
        return GpuSample(
            now_s, self.source, "NVML does not answer; see the driver's log", cards=cards, findings=(slow,)
        )

    def _failed(self, error: Exception, now_s: float) -> GpuSample:
        if isinstance(error, NvmlUnavailable):
            return GpuSample(now_s, self.source, str(error), absent=error.absent)
        if isinstance(error, NvmlFault):
            return GpuSample(now_s, self.source, f"NVML lists no GPU ({error.reason}); see the driver's log")
        return GpuSample(now_s, self.source, f"NVML cannot be read ({type(error).__name__}); install nvidia-ml-py")

    def __repr__(self) -> str:
        devices = "all" if self._devices is None else ",".join(self._devices)
        return f"<NvmlSource devices={devices} {self._thread!r}>"


def _unnamed(cards: int) -> tuple[Finding, ...]:
    """Without devices the engine is taken to run on all that can be seen, which is a guess where there are several."""
    if cards < 2:
        return ()
    return (
        Finding(
            "devices_unnamed", f"{cards} GPUs are counted as this engine's; name its own as gpu: {{devices: [...]}}"
        ),
    )
