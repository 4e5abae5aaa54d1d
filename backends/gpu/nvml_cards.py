"""Reading cards through a session: which are meant, and field by field what each tells.

Cards are looked up again at each read, which costs microseconds: a card may vanish, return or be partitioned at any
time, and a kept handle would not tell. A card in MIG mode stands for its slices, as it does for CUDA; what is true of
the whole die (temperature, clocks) is asked of the parent where a slice does not tell, as far as we may. A call that
took too long is not made again for a while, so that it costs the other fields only one read.

Blocks; belongs to the thread of `backends.gpu.nvml`, which reads `Progress` from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from backends.gpu.base import OF_THE_DIE, GpuField, GpuReading, Raw, Unknown, reading
from backends.gpu.devices import is_slice
from backends.gpu.nvml_session import NvmlFault, NvmlSession

SLOW_CALL_S: Final = 0.5
LEFT_OUT_S: Final = 60.0
"""So long a call that was slow is not made again."""

_PROFILE: Final = re.compile(r"MIG (\S+)$")
_MIG_ON: Final = 1
_SLICES_MAX: Final = 16
_CARDS_MAX: Final = 64
_TEMPERATURE, _SHUTDOWN, _SLOWDOWN = 0, 0, 1  # numbers of nvml.h, which old modules do not all name


@dataclass(frozen=True, slots=True)
class Found:
    """A card as it was found. handle is None, and fault says why, for one that is not there."""

    id: str
    handle: Any = None
    parent: Any = None
    index: str = ""
    name: str = ""
    partition: str = ""
    instance: str = ""
    pci_bus_id: str = ""
    fault: Unknown = Unknown.GONE

    def reading(self, raw: Raw, missing: Unknown) -> GpuReading:
        """The card with what is known of it."""
        return reading(
            self.id,
            raw,
            missing=missing,
            index=self.index,
            name=self.name,
            partition=self.partition,
            instance=self.instance,
            pci_bus_id=self.pci_bus_id,
        )


class Progress:
    """What one read has found so far; written by its thread, read by anyone: each store is one whole new value."""

    __slots__ = ("cards", "found", "whole")

    def __init__(self) -> None:
        self.found: tuple[Found, ...] = ()
        self.cards: tuple[Mapping[GpuField, float | Unknown], ...] = ()
        self.whole = False

    def readings(self) -> tuple[GpuReading, ...]:
        """The cards; what was not reached in time has timed out."""
        missing = Unknown.NOT_TOLD if self.whole else Unknown.TIMED_OUT
        cards = self.cards
        return tuple(
            card.reading(raw, missing)
            for card, raw in zip(self.found, (*cards, *({} for _ in self.found[len(cards) :])), strict=True)
        )


class NvmlCards:
    """See the module header."""

    def __init__(self, session: NvmlSession, monotonic: Callable[[], float]) -> None:
        self._session = session
        self._monotonic = monotonic
        self._left_out: dict[tuple[str, str], float] = {}

    def read(self, devices: Sequence[str] | None, progress: Progress) -> None:
        """Read these cards, or all. Raises NvmlUnavailable."""
        self._session.open()
        broken = False
        try:
            for card in self._find(devices):
                progress.found = (*progress.found, card)
            for card in progress.found:
                broken |= self._read_card(card, progress)
            progress.whole = True
        except NvmlFault as fault:  # the host cannot even be asked how many cards it has
            broken = fault.broken
            raise
        finally:
            self._session.settle(broken=broken)

    # -- which cards -----------------------------------------------------------------------------------------------

    def _find(self, devices: Sequence[str] | None) -> Iterator[Found]:
        if devices is None:
            devices = [str(index) for index in range(min(_CARDS_MAX, int(self._session.call("nvmlDeviceGetCount"))))]
        for address in devices:
            try:
                if address.isdigit():
                    yield from self._at_index(int(address))
                else:
                    yield self._with_uuid(address)
            except NvmlFault as fault:
                yield Found(
                    address,
                    index=address if address.isdigit() else "",
                    partition="mig" if is_slice(address) else "",
                    # A number past the last card is told as an argument that is not supported.
                    fault=Unknown.GONE if fault.reason is Unknown.NOT_SUPPORTED else fault.reason,
                )

    def _at_index(self, index: int) -> Iterator[Found]:
        handle = self._session.call("nvmlDeviceGetHandleByIndex", index)
        slices = [] if not self._may_be_partitioned(handle) else list(self._slices(handle))
        if slices:
            for number, piece in enumerate(slices):
                yield self._described(piece, parent=handle, otherwise=f"MIG-{index}/{number}", index=str(index))
        else:
            yield self._described(handle, otherwise=str(index), index=str(index))

    def _may_be_partitioned(self, handle: Any) -> bool:
        try:
            mode = self._session.call("nvmlDeviceGetMigMode", handle)
        except NvmlFault as fault:
            return fault.reason is Unknown.NO_PERMISSION  # the parent is not ours to ask; its slices may be
        return bool(mode[0] == _MIG_ON)

    def _slices(self, handle: Any) -> Iterator[Any]:
        for number in range(_SLICES_MAX):
            try:
                yield self._session.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            except NvmlFault:  # numbers may have gaps, where a slice was taken away
                continue

    def _with_uuid(self, address: str) -> Found:
        try:
            handle = self._session.call("nvmlDeviceGetHandleByUUID", address)
        except NvmlFault:
            return self._by_beginning(address)
        parent = self._or_none("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if is_slice(address) else None
        found = self._described(handle, parent=parent, otherwise=address)
        return replace(found, id=address, partition=found.partition or "mig") if is_slice(address) else found

    def _by_beginning(self, address: str) -> Found:
        """CUDA takes UUIDs cut short, as long as only one card begins so. (Old modules take none as text: it is found here.)"""
        count = int(self._session.call("nvmlDeviceGetCount"))
        cards = [
            card
            for index in range(min(_CARDS_MAX, count))
            for card in self._quietly(index)
            if card.id.startswith(address)
        ]
        if len(cards) != 1:
            raise NvmlFault(Unknown.GONE)
        return cards[0]

    def _quietly(self, index: int) -> list[Found]:
        try:
            return list(self._at_index(index))
        except NvmlFault:
            return []

    def _described(self, handle: Any, *, parent: Any = None, otherwise: str, index: str = "") -> Found:
        uuid = self._text_or("", "nvmlDeviceGetUUID", handle)
        name = self._text_or("", "nvmlDeviceGetName", handle)
        profile = _PROFILE.search(name)
        sliced = parent is not None or is_slice(uuid)
        instance = self._or_none("nvmlDeviceGetGpuInstanceId", handle) if sliced else None
        if not index:
            number = self._or_none("nvmlDeviceGetIndex", parent if parent is not None else handle)
            index = "" if number is None else str(number)
        return Found(
            uuid if uuid and is_slice(uuid) == sliced else otherwise,
            handle,
            parent=parent,
            index=index,
            name=name,
            partition=(profile[1] if profile else "mig") if sliced else "",
            instance="" if instance is None else str(instance),
            pci_bus_id=self._bus(parent if parent is not None else handle),
        )

    def _bus(self, handle: Any) -> str:
        info = self._or_none("nvmlDeviceGetPciInfo", handle)
        bus = getattr(info, "busId", b"")
        return bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus)

    def _or_none(self, name: str, *args: Any) -> Any:
        try:
            return self._session.call(name, *args)
        except NvmlFault:
            return None

    def _text_or(self, otherwise: str, name: str, *args: Any) -> str:
        try:
            return self._session.text(name, *args)
        except NvmlFault:
            return otherwise

    # -- what each tells -------------------------------------------------------------------------------------------

    def _read_card(self, card: Found, progress: Progress) -> bool:
        """Read all fields, telling each as it comes; True when a new session might find more."""
        before = progress.cards
        raw: dict[GpuField, float | Unknown] = {}
        gone = card.fault if card.handle is None else None
        broken = gone is Unknown.GONE
        for fields, read in _READERS:
            if gone is not None:
                raw.update(dict.fromkeys(fields, gone))
                continue
            found, fault = self._read_fields(card, fields, read)
            raw.update(found)
            progress.cards = (*before, dict(raw))
            if fault is not None:
                broken |= fault.broken
                gone = Unknown.GONE if fault.reason is Unknown.GONE else None
        progress.cards = (*before, raw)
        return broken

    def _read_fields(
        self, card: Found, fields: tuple[GpuField, ...], read: _Read
    ) -> tuple[dict[GpuField, float | Unknown], NvmlFault | None]:
        key = (card.id, fields[0].value)
        began_s = self._monotonic()
        if began_s < self._left_out.get(key, began_s):
            return dict.fromkeys(fields, Unknown.TIMED_OUT), None
        fault: NvmlFault | None = None
        found: dict[GpuField, float | Unknown] = {}
        for handle in (card.handle, card.parent if OF_THE_DIE.issuperset(fields) else None):
            if handle is None:
                break
            try:
                told = read(self._session, handle)
                found.update((one, _number(value)) for one, value in zip(fields, told, strict=True))
                fault = None
                break
            except NvmlFault as failed:
                fault = fault or failed
            except Exception:  # a module that returns what no version of it documents
                fault = fault or NvmlFault(Unknown.FAILED)
        if self._monotonic() - began_s > SLOW_CALL_S:
            self._left_out[key] = self._monotonic() + LEFT_OUT_S
        if fault is not None:
            found.update(dict.fromkeys(fields, fault.reason))
        return found, fault


def _number(value: float | Unknown) -> float | Unknown:
    return value if isinstance(value, Unknown) else float(value)


_Read = Callable[[NvmlSession, Any], Sequence[float | Unknown]]


def _memory(session: NvmlSession, handle: Any) -> Sequence[float | Unknown]:
    """The second version tells apart what the driver reserves; the first counts it as used."""
    try:
        info = session.call("nvmlDeviceGetMemoryInfo", handle, session.constant("nvmlMemory_v2"))
        return info.total, info.used, info.free, info.reserved
    except NvmlFault as fault:
        if fault.reason in {Unknown.GONE, Unknown.NO_PERMISSION}:
            raise
    info = session.call("nvmlDeviceGetMemoryInfo", handle)
    return info.total, info.used, info.free, Unknown.NO_FUNCTION


def _busy(session: NvmlSession, handle: Any) -> Sequence[float]:
    rates = session.call("nvmlDeviceGetUtilizationRates", handle)
    return rates.gpu / 100, rates.memory / 100


def _temperature(session: NvmlSession, handle: Any) -> Sequence[float]:
    try:
        return (session.call("nvmlDeviceGetTemperature", handle, _TEMPERATURE),)
    except NvmlFault as fault:
        if fault.reason not in {Unknown.NO_FUNCTION, Unknown.NOT_SUPPORTED}:
            raise
        try:
            return (session.call("nvmlDeviceGetTemperatureV", handle, _TEMPERATURE),)  # the newer name
        except NvmlFault:
            raise fault from None


def _threshold(which: int) -> _Read:
    return lambda session, handle: (session.call("nvmlDeviceGetTemperatureThreshold", handle, which),)


def _margin(session: NvmlSession, handle: Any) -> Sequence[float]:
    return (session.call("nvmlDeviceGetMarginTemperature", handle),)


def _thousandths(name: str) -> _Read:
    """NVML counts milliwatts and millijoules."""
    return lambda session, handle: (session.call(name, handle) / 1000,)


def _clock_reasons(session: NvmlSession, handle: Any) -> Sequence[float]:
    try:
        return (session.call("nvmlDeviceGetCurrentClocksEventReasons", handle),)
    except NvmlFault as fault:
        if fault.reason is not Unknown.NO_FUNCTION:
            raise
        return (session.call("nvmlDeviceGetCurrentClocksThrottleReasons", handle),)  # its name before driver 535


_READERS: Final[tuple[tuple[tuple[GpuField, ...], _Read], ...]] = (
    (
        (
            GpuField.MEMORY_TOTAL_BYTES,
            GpuField.MEMORY_USED_BYTES,
            GpuField.MEMORY_FREE_BYTES,
            GpuField.MEMORY_RESERVED_BYTES,
        ),
        _memory,
    ),
    ((GpuField.BUSY_FRACTION, GpuField.MEMORY_BUSY_FRACTION), _busy),
    ((GpuField.TEMPERATURE_C,), _temperature),
    ((GpuField.SLOWDOWN_C,), _threshold(_SLOWDOWN)),
    ((GpuField.SHUTDOWN_C,), _threshold(_SHUTDOWN)),
    ((GpuField.HEAT_MARGIN_C,), _margin),
    ((GpuField.POWER_W,), _thousandths("nvmlDeviceGetPowerUsage")),
    ((GpuField.POWER_LIMIT_W,), _thousandths("nvmlDeviceGetEnforcedPowerLimit")),
    ((GpuField.ENERGY_J_TOTAL,), _thousandths("nvmlDeviceGetTotalEnergyConsumption")),
    ((GpuField.CLOCK_REASONS,), _clock_reasons),
)
