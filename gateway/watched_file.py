"""How a file that is watched is opened: regular files alone, and never to wait.

A pipe keeps who opens it until somebody writes: the watch would be over, and nobody told.
"""

from __future__ import annotations

import errno
import os
import stat


def regular(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError for what is no regular file."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no regular file, so it cannot be watched", path)
