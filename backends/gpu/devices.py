"""Which GPUs of a host are meant: by index, by UUID, by MIG slice, or by what CUDA would show.

`CUDA_VISIBLE_DEVICES` is read as CUDA reads it: unset means all; the list ends at the first entry that names nothing
(so "" and "-1" mean none); UUIDs may be cut short. An index is NVML's, in PCI order, which is CUDA's too wherever the
cards are alike or `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_ADDRESS = re.compile(r"\d{1,4}|(?:GPU|MIG)-[0-9A-Za-z/_-]{1,128}")


class DeviceError(ValueError):
    """The text names no GPU."""


def check_device(text: str) -> str:
    """The address in its one form. Raises DeviceError."""
    address = text.strip()
    if not _ADDRESS.fullmatch(address):
        raise DeviceError(f"gpu device {text[:80]!r}: expected an index, GPU-<uuid> or MIG-<uuid>; see nvidia-smi -L")
    return str(int(address)) if address.isdigit() else address


def visible_devices(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """What `CUDA_VISIBLE_DEVICES` leaves to be seen; None for all."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else tuple(_until_invalid(listed.split(",")))


def is_slice(address: str) -> bool:
    """True for the address of a MIG slice."""
    return address.startswith("MIG-")


def _until_invalid(entries: Iterable[str]) -> Iterable[str]:
    seen: set[str] = set()
    for entry in entries:
        try:
            address = check_device(entry)
        except DeviceError:
            return
        if address not in seen:
            seen.add(address)
            yield address
