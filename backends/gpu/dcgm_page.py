"""A sample as a DCGM exporter would show it: the page of `headrace gpu-exporter`.

Names, labels and units are DCGM's, so that the dashboards and scrapers made for it work. A field without a value has no
series (DCGM prints a huge number there). A slice carries its own UUID, where DCGM repeats the card's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.gpu.base import GpuReading, GpuSample
from backends.gpu.dcgm import NAMES, DcgmName

UP: Final = "headrace_gpu_exporter_up"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def page(sample: GpuSample, *, host: str) -> bytes:
    """The page; without a readable GPU it holds only the row that says so. host: for the label Hostname."""
    lines = [f"# HELP {UP} 1 while some GPU can be read.", f"# TYPE {UP} gauge", f"{UP} {int(sample.up)}"]
    for one, (name, *_) in NAMES.items():
        rows = [
            f"{name.name}{{{','.join(_labels(card, host))}}} {_number(card.values[one], name)}"
            for card in sample.cards
            if one in card.values
        ]
        if rows:
            kind = "counter" if name.counter else "gauge"
            lines += [f"# HELP {name.name} {name.text}", f"# TYPE {name.name} {kind}", *rows]
    return ("\n".join(lines) + "\n").encode()


def _labels(card: GpuReading, host: str) -> Iterator[str]:
    yield _label("gpu", card.index)
    yield _label("UUID", card.id)
    yield _label("pci_bus_id", card.pci_bus_id)
    yield _label("device", f"nvidia{card.index}" if card.index else "")
    yield _label("modelName", card.name)
    if card.partition:
        yield _label("GPU_I_PROFILE", card.partition)
        yield _label("GPU_I_ID", card.instance)
    yield _label("Hostname", host)


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'


def _number(value: float, name: DcgmName) -> str:
    """Whole numbers as such; others as far as their unit can tell, without the dust of the conversion."""
    scaled = round(value * name.per, 6)
    return str(int(scaled)) if scaled.is_integer() else repr(scaled)
