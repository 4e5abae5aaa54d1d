"""The cards of any host, from the page of a DCGM exporter (or `headrace gpu-exporter`, which speaks the same).

An exporter tells what its operator chose: thresholds, power limit and clock reasons are off by default, so their fields
are unknown there. The same GPU may stand on the page several times (once a pod); names changed between versions, and
the newer carry their unit. "Blank" is printed as a number: 2^63 less a few for integers, 2^47 and a few for floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.base import BackendError
from backends.exposition import Series, parse
from backends.gpu.base import MIB, OF_THE_DIE, Finding, GpuField, GpuReading, GpuSample, Unknown, reading
from backends.gpu.combine import combined
from backends.openai_compatible import Pool

READ_S = 2.0


@dataclass(frozen=True, slots=True)
class DcgmName:
    """One metric of an exporter. per: how many of its units make one of ours."""

    name: str
    per: float = 1.0
    counter: bool = False
    text: str = ""


NAMES: Final[Mapping[GpuField, tuple[DcgmName, ...]]] = {
    GpuField.MEMORY_TOTAL_BYTES: (DcgmName("DCGM_FI_DEV_FB_TOTAL", 1 / MIB, text="Framebuffer memory (in MiB)."),),
    GpuField.MEMORY_USED_BYTES: (DcgmName("DCGM_FI_DEV_FB_USED", 1 / MIB, text="Framebuffer memory used (in MiB)."),),
    GpuField.MEMORY_FREE_BYTES: (DcgmName("DCGM_FI_DEV_FB_FREE", 1 / MIB, text="Framebuffer memory free (in MiB)."),),
    GpuField.MEMORY_RESERVED_BYTES: (
        DcgmName("DCGM_FI_DEV_FB_RESERVED", 1 / MIB, text="Framebuffer memory reserved (in MiB)."),
    ),
    GpuField.BUSY_FRACTION: (
        DcgmName("DCGM_FI_DEV_GPU_UTIL", 100, text="GPU utilization (in %)."),
        DcgmName("DCGM_FI_DEV_GPU_UTIL_RATIO"),
    ),
    GpuField.MEMORY_BUSY_FRACTION: (
        DcgmName("DCGM_FI_DEV_MEM_COPY_UTIL", 100, text="Memory utilization (in %)."),
        DcgmName("DCGM_FI_DEV_MEM_COPY_UTIL_RATIO"),
    ),
    GpuField.TEMPERATURE_C: (
        DcgmName("DCGM_FI_DEV_GPU_TEMP", text="GPU temperature (in C)."),
        DcgmName("DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
    ),
    GpuField.SLOWDOWN_C: (
        DcgmName("DCGM_FI_DEV_SLOWDOWN_TEMP", text="Temperature at which the GPU slows down (in C)."),
        DcgmName("DCGM_FI_DEV_GPU_TEMP_SLOWDOWN_CELSIUS"),
    ),
    GpuField.SHUTDOWN_C: (
        DcgmName("DCGM_FI_DEV_SHUTDOWN_TEMP", text="Temperature at which the GPU shuts down (in C)."),
        DcgmName("DCGM_FI_DEV_GPU_TEMP_SHUTDOWN_CELSIUS"),
    ),
    GpuField.HEAT_MARGIN_C: (
        DcgmName("DCGM_FI_DEV_GPU_TEMP_LIMIT", text="Distance to the temperature of the slow-down (in C)."),
        DcgmName("DCGM_FI_DEV_GPU_TEMP_MARGIN_CELSIUS"),
    ),
    GpuField.POWER_W: (
        DcgmName("DCGM_FI_DEV_POWER_USAGE", text="Power draw (in W)."),
        DcgmName("DCGM_FI_DEV_BOARD_POWER_WATTS"),
    ),
    GpuField.POWER_LIMIT_W: (
        DcgmName("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", text="Power limit in force (in W)."),
        DcgmName("DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"),
    ),
    GpuField.ENERGY_J_TOTAL: (
        DcgmName(
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1000, counter=True, text="Energy since the driver's start (in mJ)."
        ),
    ),
    GpuField.CLOCK_REASONS: (
        DcgmName("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", text="Why clocks are held down (bitmask)."),
        DcgmName("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"),
    ),
}
"""Our fields under the exporter's names, the first of which is the one that we show ourselves."""

_WANTED: Final = frozenset(name.name for names in NAMES.values() for name in names)
_BLANK_64: Final = 2.0**63
_BLANK_FLOATS: Final = frozenset(2.0**47 + code for code in range(4))
_ENDPOINT: Final = "/metrics"


class DcgmSource:
    """One engine's cards of the host behind `pool`.

    devices   as the exporter numbers them, GPU-<uuid>, MIG-<uuid>, or GPU-<uuid>/<instance id>; None for all it shows
    where     for messages: the exporter's address
    """

    source = "dcgm"

    def __init__(
        self,
        pool: Pool,
        devices: Sequence[str] | None = None,
        *,
        where: str,
        monotonic: Callable[[], float],
        read_s: float = READ_S,
    ) -> None:
        self._pool = pool
        self._devices = devices
        self._where = where
        self._monotonic = monotonic
        self._read_s = read_s

    async def read(self) -> GpuSample:
        """See `GpuSource`."""
        try:
            status, _, page = await self._pool.fetch(b"GET", _ENDPOINT.encode(), timeout_s=self._read_s)
        except BackendError as error:
            return self._nothing(str(error))
        if status != 200:
            return self._nothing(f"GET {_ENDPOINT} answered {status}; is it a DCGM exporter?")
        cards = cards_of(page)
        if not cards:
            return self._nothing("the page shows no GPU; has the exporter access to the driver?")
        findings = tuple(_several_hosts(cards))
        if self._devices is not None:
            cards = tuple(_chosen(cards, self._devices))
        return combined(self.source, self._monotonic(), cards, findings)

    async def close(self) -> None:
        await self._pool.close()

    def _nothing(self, why: str) -> GpuSample:
        return GpuSample(self._monotonic(), self.source, f"DCGM exporter {self._where}: {why}")

    def __repr__(self) -> str:
        return f"<DcgmSource {self._where} devices={'all' if self._devices is None else ','.join(self._devices)}>"


def cards_of(page: bytes) -> tuple[GpuReading, ...]:
    """All cards on a page, each once. A card whose slices are shown is left out, and tells them its temperature."""
    found = parse(page, _WANTED)
    cards: dict[_Key, _Card] = {}
    for one, names in NAMES.items():
        for name in names:
            for labels, value in found.get(name.name, _NOTHING):
                card = cards.setdefault(_key(labels), _Card(labels))
                known = card.raw.get(one, Unknown.NOT_TOLD)
                if isinstance(known, Unknown):  # the first that says something stands
                    card.raw[one] = _value(value, name.per)
    partitioned = {key[:-1] for key in cards if key[-1]}
    for key, card in cards.items():
        whole = cards.get((*key[:-1], ""))
        if key[-1] and whole is not None:
            _lend(whole, card)
    return tuple(card.reading() for key, card in cards.items() if key[-1] or key[:-1] not in partitioned)


_NOTHING: Final[Series] = []
_Key = tuple[str, str, str]
"""Host, the card's number (or UUID), and a slice's instance id."""


@dataclass(slots=True)
class _Card:
    labels: Mapping[str, str]
    raw: dict[GpuField, float | Unknown] = field(default_factory=dict)

    def reading(self) -> GpuReading:
        labels = self.labels
        uuid = _uuid(labels)
        instance = labels.get("GPU_I_ID", "")
        sliced = bool(instance) or uuid.startswith("MIG-")
        card = uuid or labels.get("gpu", "")
        return reading(
            f"{card}/{instance}" if instance and not card.startswith("MIG-") else card,
            self.raw,
            index=labels.get("gpu", ""),
            name=labels.get("modelName", ""),
            partition=(labels.get("GPU_I_PROFILE") or "mig") if sliced else "",
            instance=instance,
            host=_host(labels),
            pci_bus_id=labels.get("pci_bus_id", ""),
        )


def _lend(whole: _Card, card: _Card) -> None:
    for one in OF_THE_DIE:
        if isinstance(card.raw.get(one, Unknown.NOT_TOLD), Unknown) and one in whole.raw:
            card.raw[one] = whole.raw[one]


def _key(labels: Mapping[str, str]) -> _Key:
    uuid = _uuid(labels)
    instance = labels.get("GPU_I_ID", "") or (uuid if uuid.startswith("MIG-") else "")
    return _host(labels), labels.get("gpu", "") or uuid, instance


def _uuid(labels: Mapping[str, str]) -> str:
    return labels.get("UUID", "") or labels.get("uuid", "")


def _host(labels: Mapping[str, str]) -> str:
    return labels.get("Hostname", "") or labels.get("hostname", "")


def _value(value: float, per: float) -> float | Unknown:
    if value >= _BLANK_64 or value in _BLANK_FLOATS:
        return Unknown.NOT_SUPPORTED
    return value / per


def _chosen(cards: Sequence[GpuReading], devices: Sequence[str]) -> Iterator[GpuReading]:
    """The cards that are meant; one that the page does not show is gone."""
    for device in devices:
        meant = [card for card in cards if _is(card, device)]
        if meant:
            yield from meant
        else:
            yield reading(device, {}, missing=Unknown.GONE)


def _is(card: GpuReading, device: str) -> bool:
    if device.isdigit():
        return card.index == device
    return card.id == device or card.id.partition("/")[0] == device


def _several_hosts(cards: Sequence[GpuReading]) -> Iterator[Finding]:
    hosts = sorted({card.host for card in cards})
    if len(hosts) > 1:
        yield Finding("several_hosts", f"one page shows GPUs of {', '.join(hosts)}; name the engine's own by UUID")
