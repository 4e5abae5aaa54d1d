"""pynvml as it is met: one library session, opened when it can be, given up and opened anew when it breaks.

Everything here blocks and belongs to one thread (`backends.gpu.nvml`). What is met in the field:

- The module may be missing, or one of two distributions of that name: functions are looked up one by one, names may be
  bytes, signatures may be older.
- The library may be missing, not permitted, or differ from the kernel driver in version. Opening is tried again with
  back-off, so that a repaired driver is picked up; after a version mismatch the library is unloaded first, since the
  loader would hand out the old one for ever.
- A card may vanish. The library finds it again, if at all, only in a new session, so a session with a lost card is
  closed after a while and the next read opens another.
"""

from __future__ import annotations

import _ctypes
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

from backends.gpu.base import Unknown

RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 60.0

_REASONS: Final = {
    2: Unknown.NOT_SUPPORTED,  # an argument that this driver does not know
    3: Unknown.NOT_SUPPORTED,
    4: Unknown.NO_PERMISSION,
    6: Unknown.GONE,
    10: Unknown.TIMED_OUT,
    13: Unknown.NO_FUNCTION,
    15: Unknown.GONE,
    16: Unknown.GONE,
    25: Unknown.NO_FUNCTION,
    26: Unknown.NO_FUNCTION,
    28: Unknown.GONE,
}
_NO_DRIVER, _NO_LIBRARY, _MISMATCH = 9, 12, 18
_BROKEN: Final = frozenset({1, _NO_DRIVER, 15, 16, _MISMATCH, 999})
"""Errors that a new session may heal: uninitialised, driver gone, card lost or to be reset, mismatch, unknown."""

_WORDS: Final = {
    4: "no permission for the NVIDIA driver; give this process access to /dev/nvidia*",
    _NO_DRIVER: "the NVIDIA driver is not loaded; load it, or say gpu: {source: none}",
    _NO_LIBRARY: "libnvidia-ml.so.1 not found; install the NVIDIA driver's library, or say gpu: {source: none}",
    _MISMATCH: "the NVIDIA driver and its library differ in version; reload the driver or restart the machine",
}


class NvmlFault(Exception):
    """One call failed, for a reason that a field can carry. broken: a new session may heal it."""

    def __init__(self, reason: Unknown, *, broken: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.broken = broken


class NvmlUnavailable(Exception):
    """No session can be had now. absent: there is no driver or no library here at all."""

    def __init__(self, detail: str, *, absent: bool) -> None:
        super().__init__(detail)
        self.absent = absent


class NvmlSession:
    """See the module header.

    load        makes the module; called at each opening until it succeeds
    monotonic   this process's clock
    """

    def __init__(self, monotonic: Callable[[], float], load: Callable[[], ModuleType] | None = None) -> None:
        self._monotonic = monotonic
        self._load = load or _import_pynvml
        self._module: ModuleType | None = None
        self._unavailable = NvmlUnavailable("NVML was not opened yet", absent=False)
        self._opening = _Backoff()
        self._renewing = _Backoff()

    def open(self) -> None:
        """Have a session. Raises NvmlUnavailable, at once while it is too early to try again."""
        if self._module is not None:
            return
        now_s = self._monotonic()
        if now_s < self._opening.due_s:
            raise self._unavailable
        module: ModuleType | None = None
        try:
            module = self._load()
            module.nvmlInit()
        except Exception as error:
            self._opening.wait(now_s)
            self._unavailable = _unavailable(error)
            if module is not None and _code(error) == _MISMATCH:
                _unload(module)
            raise self._unavailable from None
        self._module = module
        self._opening.reset()

    def call(self, name: str, *args: Any) -> Any:
        """What a function of the module returns. Raises NvmlFault, whatever it raised."""
        function = getattr(self._module, name, None)
        if function is None:
            raise NvmlFault(Unknown.NO_FUNCTION)
        try:
            return function(*args)
        except TypeError:
            raise NvmlFault(Unknown.NO_FUNCTION) from None  # the signature of another version
        except Exception as error:
            code = _code(error)
            raise NvmlFault(_REASONS.get(code, Unknown.FAILED), broken=code in _BROKEN) from None

    def text(self, name: str, *args: Any) -> str:
        """The same for functions that return text, which old modules return as bytes."""
        found = self.call(name, *args)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)

    def constant(self, name: str) -> Any:
        """A constant of the module. Raises NvmlFault where it has none."""
        found = getattr(self._module, name, None)
        if found is None:
            raise NvmlFault(Unknown.NO_FUNCTION)
        return found

    def settle(self, *, broken: bool) -> None:
        """A read ended. After a broken one the next read opens a new session, but not sooner than the back-off says."""
        now_s = self._monotonic()
        if not broken:
            self._renewing.reset()
        elif now_s >= self._renewing.due_s:
            self._renewing.wait(now_s)
            self._shut()

    def close(self) -> None:
        """End the session."""
        self._shut()

    def _shut(self) -> None:
        module, self._module = self._module, None
        if module is not None:
            with suppress(Exception):  # a broken library fails here too
                module.nvmlShutdown()

    def __repr__(self) -> str:
        return f"<NvmlSession {'open' if self._module is not None else self._unavailable}>"


class _Backoff:
    """When to try again: each wait is twice the one before, up to a bound."""

    __slots__ = ("_next_s", "due_s")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._next_s = RETRY_FIRST_S
        self.due_s = -math.inf

    def wait(self, now_s: float) -> None:
        self.due_s = now_s + self._next_s
        self._next_s = min(RETRY_MAX_S, self._next_s * 2)


def _import_pynvml() -> ModuleType:
    """The module, without the noise that some distributions of it make about themselves."""
    importlib.invalidate_caches()  # it may have been installed since the last try
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("pynvml")


def _unload(module: ModuleType) -> None:
    """Forget the module and the library that it has loaded, so that the next opening finds what is on disk then."""
    inner = getattr(module, "nvml", module)  # old distributions are packages
    library = getattr(inner, "nvmlLib", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pynvml"]:
        del sys.modules[name]
    if library is not None:
        with suppress(OSError):
            _ctypes.dlclose(library._handle)


def _code(error: Exception) -> int:
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else -1


def _unavailable(error: Exception) -> NvmlUnavailable:
    code = _code(error)
    if code == -1:
        if isinstance(error, ModuleNotFoundError):
            return NvmlUnavailable("NVML: the module pynvml is missing; install nvidia-ml-py", absent=True)
        return NvmlUnavailable(
            f"NVML: pynvml cannot be used ({type(error).__name__}); install nvidia-ml-py", absent=False
        )
    words = _WORDS.get(code, "it cannot be opened; see the driver's log")
    return NvmlUnavailable(f"NVML error {code}: {words}", absent=code in {_NO_DRIVER, _NO_LIBRARY})
