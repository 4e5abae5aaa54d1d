"""Reading the addresses that an operator writes: where to listen, and where engines are.

Operators paste base URLs in every form (`http://h:8000`, `.../`, `.../v1`, `.../v1/`); each names the same engine, and
the adapters join paths themselves, so one form is kept: scheme, host, port and prefix, without a trailing slash and
without `/v1`. Credentials in a URL are refused, since URLs end up in logs and status pages, and no message made here
repeats them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.settings import EngineSettings

ENGINE_KINDS = ("auto", "vllm", "tgi", "sglang", "llamacpp", "trtllm", "triton", "openai")

_ENGINE = re.compile(r"(?:(?P<name>[^=:/]+)=)?(?:(?P<kind>\w+)\+)?(?P<url>https?://.*)", re.DOTALL)
_NAME = re.compile(r"[\w.:\[\]-]{1,64}", re.ASCII)


class AddressError(ValueError):
    """The text names no address. The message says what was expected and what to do, without any credential."""


@dataclass(frozen=True, slots=True)
class Listen:
    """A host and a port to listen on; port 0 lets the system choose one."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def reached_by(self, url: str) -> bool:
        """Whether a URL in its one form comes out here, as far as its text tells: no name service is asked."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if port != self.port:
            return False
        host = (parts.hostname or "").rstrip(".")
        if host == self.host.lower():
            return True
        there = Listen(host, port).loopback
        if self.host in {"0.0.0.0", "::"}:
            return there or host in {self.host, socket.gethostname().lower()}
        return there and self.loopback and "localhost" in {host, self.host}

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_listen(text: str) -> Listen:
    """Read `host:port`, `[::1]:port` or `:port` (every address). Raises AddressError."""
    host, colon, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in bare and host == bare):
        raise AddressError(f"listen address {text!r}: expected host:port, e.g. 127.0.0.1:8080 or [::1]:8080")
    return Listen(bare or "0.0.0.0", int(port))


def parse_engine(text: str) -> EngineSettings:
    """Read `[name=][kind+]url` of a command line. Raises AddressError."""
    match = _ENGINE.fullmatch(text.strip())
    if match is None:
        raise AddressError(
            f"engine {shown_url(text)!r}: expected [NAME=][KIND+]http://HOST:PORT; e.g. --engine tgi+http://gpu2:8080"
        )
    return engine_at(match["url"], name=match["name"], kind=match["kind"] or "auto")


def engine_at(url: str, *, name: str | None = None, kind: str = "auto", api_key: str | None = None) -> EngineSettings:
    """An engine at a URL in any accepted form; without a name, host, port and prefix are its name.

    Raises AddressError.
    """
    if kind not in ENGINE_KINDS:
        raise AddressError(f"engine kind {kind!r}: expected one of {', '.join(ENGINE_KINDS)}")
    url = normalise_url(url)
    name = url.partition("://")[2] if name is None else check_name(name)
    return EngineSettings(name=name, url=url, kind=kind, api_key=api_key)


def check_name(name: str) -> str:
    """The name, if it is fit for logs, labels and keys. Raises AddressError."""
    if not _NAME.fullmatch(name):
        raise AddressError(f"engine name {name[:80]!r}: expected 1 to 64 letters, digits or any of . - _ : [ ]")
    return name


def normalise_url(text: str, *, what: str = "engine url") -> str:
    """The one form of an engine's base URL. what: how messages call it. Raises AddressError."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        raise AddressError(f"{what} {shown_url(text)!r}: expected http://HOST:PORT with a port of 1 to 65535") from None
    if port == 0:
        raise AddressError(f"{what} {shown_url(text)!r}: expected http://HOST:PORT with a port of 1 to 65535")
    if (
        parts.scheme not in {"http", "https"}
        or not _is_host(parts.hostname or "")
        or re.search(r"[\s\x00-\x1f]", text.strip())
    ):
        raise AddressError(f"{what} {shown_url(text)!r}: expected http://HOST:PORT or https://HOST:PORT")
    if "@" in text:  # also in the path, where a password with a bare / in it would end up
        raise AddressError(
            f"{what} {shown_url(text)!r}: must not hold credentials; give the engine's key as api_key, api_key_env or"
            " HEADRACE_ENGINE_API_KEY"
        )
    if parts.query or parts.fragment or "?" in text or "#" in text:
        raise AddressError(f"{what} {shown_url(text)!r}: must not hold a query or a fragment; remove it")
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    path = re.sub(r"/+", "/", parts.path).rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


def _is_host(name: str) -> bool:
    """Whether a name service could be asked for it, or it is an address."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return ":" in name


def shown_url(text: str) -> str:
    """An operator's URL as a message may repeat it: without credentials and query.

    A password with a bare / ? or # in it is a mistake that is made, and then is not where one stands: so nothing before
    the last @ is shown, and where that @ follows a ? or # nothing at all.
    """
    head, _, tail = re.sub("#", "?", text).partition("?")
    scheme = head.partition("://")[0] + "://" if "://" in head else ""
    if "@" in tail:
        return f"{scheme}…"[:200]
    return (f"{scheme}…@{head.rpartition('@')[2]}" if "@" in head else head)[:200]
