"""A log of the traffic that can be replayed: when what came, of which class and tenant, how large, and how it ended.

No text: sizes, names of classes and models, and two kinds of keyed hashes. A tenant is told apart from others but not
named. A *prefix hash* stands for the first 1, 2, 3 ... KiB of a request's prompt, as it stands in the body from the name
of its field on, so that requests with the same beginning can be seen to have it whatever stands before it. It costs about
4 us a KiB on the loop, and so is off unless asked for. The key is the
installation's own, made once: without it a hash says nothing, and two installations' hashes cannot be compared.

Rows are gathered on the loop and written by a thread of the recorder's own, to files of bounded size in a ring of bounded
number; several processes share the folder, each writes its own files, and the oldest of all go first. What cannot be
written is dropped and said; requests never wait for it.

`headrace replay FOLDER` reads the whole ring as one trace.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from gateway.logs import Log
from gateway.settings import RecorderSettings
from policies.vocabulary import Outcome, Work

MARK = "# headrace traffic"
"""How a recorded file begins: `arrival_s` of its rows counts from 1970, and not from the start of the trace."""
COLUMNS = (
    "arrival_s", "class", "tenant", "model", "prompt_tokens", "output_tokens", "max_tokens", "prefix_hashes", "result",
)  # fmt: skip
PREFIX_BYTES = 1024
PREFIXES_MAX = 16
FLUSH_S = 1.0
ROWS_MAX = 20_000
"""Rows held until the next flush; further ones are dropped."""
KEY_BYTES = 32
HASH_BYTES = 8
TENANTS_KEPT = 4096
_PROMPTS = (b'"messages"', b'"prompt"', b'"input"', b'"inputs"')

_Row = tuple[object, ...]


class Recorder:
    """See the module header. `record` is called on the loop; `run` flushes until cancelled, `close` once more."""

    def __init__(
        self, settings: RecorderSettings, folder: Path, *, key: bytes, name: str, wall_s: Callable[[], float], log: Log
    ) -> None:
        """name: this process's part of the files' names, unique in the folder. key: as `installation_key` gives it."""
        self._files = _Ring(folder, name, settings.file_bytes, settings.files, wall_s)
        self._hasher = hashlib.blake2b(key=key, digest_size=HASH_BYTES)
        self._prefixes = settings.prefix_hashes
        self._tenant = lru_cache(TENANTS_KEPT)(self._tenant_hash)
        self._log = log
        self._rows: list[_Row] = []
        self._lost = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")

    def record(self, work: Work, outcome: Outcome, body: bytes) -> None:
        """Keep one work that has ended. The model's name is kept only where an engine served it: else it is any text."""
        if len(self._rows) >= ROWS_MAX:
            self._lost += 1
            return
        self._rows.append(
            (
                f"{work.accepted_s:.3f}",
                work.class_name,
                self._tenant(work.tenant),
                work.model if outcome.engine else "",
                outcome.prompt_tokens,
                outcome.output_tokens,
                "" if work.max_tokens is None else work.max_tokens,
                self._prefix_hashes(body) if self._prefixes else "",
                str(outcome.result),
            )
        )

    async def run(self) -> None:
        """Write what was recorded, every FLUSH_S, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what was recorded. What cannot be written is said in the log."""
        rows, self._rows = self._rows, []
        lost, self._lost = self._lost, 0
        if rows:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._files.write, rows)
            except OSError as error:
                lost += len(rows)
                reason = error.strerror or str(error)
                self._log.warning("traffic not recorded", reason=reason, repeat_key="traffic not recorded")
        if lost:
            self._log.warning("traffic rows dropped", rows=lost, repeat_key="traffic rows dropped")

    async def close(self) -> None:
        """Flush and end the thread."""
        await self.flush()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._files.close)
        self._thread.shutdown()

    def _tenant_hash(self, tenant: str) -> str:
        hasher = self._hasher.copy()
        hasher.update(tenant.encode(errors="surrogatepass"))
        return hasher.hexdigest()

    def _prefix_hashes(self, body: bytes) -> str:
        start = next((at for name in _PROMPTS if (at := body.find(name)) >= 0), 0)
        prompt = body[start : start + PREFIXES_MAX * PREFIX_BYTES]
        hasher = self._hasher.copy()
        hashes = []
        for end in range(PREFIX_BYTES, len(prompt) + 1, PREFIX_BYTES):
            hasher.update(prompt[end - PREFIX_BYTES : end])
            hashes.append(hasher.hexdigest())
        return " ".join(hashes)

    def __repr__(self) -> str:
        return f"<Recorder rows={len(self._rows)} {self._files!r}>"


class _Ring:
    """The files. Everything here runs on the recorder's thread."""

    def __init__(self, folder: Path, name: str, file_bytes: int, files: int, wall_s: Callable[[], float]) -> None:
        self._folder = folder
        self._name = name
        self._file_bytes = file_bytes
        self._files = files
        self._wall_s = wall_s
        self._number = 0
        self._path: Path | None = None
        self._file: Any = None
        self._written_bytes = 0

    def write(self, rows: list[_Row]) -> None:
        """Append rows, in a new file where the last is full or somebody took it away. Raises OSError."""
        for start in range(0, len(rows), _CHUNK_ROWS):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows[start : start + _CHUNK_ROWS])
            data = text.getvalue().encode(errors="replace")
            if self._path is None or not self._path.exists() or self._written_bytes + len(data) > self._file_bytes:
                self._open()
            self._file.write(data)
            self._written_bytes += len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = self._path = None

    def _open(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        self._path = self._folder / f"traffic-{int(self._wall_s() * 1000):013d}-{self._name}-{self._number}.csv"
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
        head = (
            f"{MARK}: arrival_s counts from 1970; the n-th prefix hash stands for the first n KiB of the prompt\n"
            f"{','.join(COLUMNS)}\n"
        ).encode()
        self._file.write(head)
        self._written_bytes = len(head)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Oldest by the last write: a file that another process is writing is not."""
        found = []
        for path in self._folder.glob("traffic-*.csv"):
            try:
                found.append((path.stat().st_mtime_ns, path.name, path))
            except FileNotFoundError:
                continue
        for _, _, path in sorted(found)[: -self._files]:
            path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<_Ring {self._path or self._folder} written_bytes={self._written_bytes}>"


_CHUNK_ROWS = 500


def installation_key(state_dir: Path) -> bytes:
    """The key of this installation's hashes, made at the first call. Raises OSError.

    Processes that start together agree on one: a file appears whole, and only where there is none.
    """
    path = state_dir / "recorder.key"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    state_dir.mkdir(parents=True, exist_ok=True)
    draft = state_dir / f".recorder.key.{secrets.token_hex(8)}"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_bytes()
