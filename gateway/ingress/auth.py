"""Who is calling: from the bytes of a request's credentials to a tenant.

Only hashes are kept. A key is looked up by the first bytes of its SHA-256 and compared in constant time over bytes, so
neither the compare nor text decoding tells anything about keys, whatever bytes a client sends. Accepted are
`Authorization: Bearer KEY` (scheme in any case), `x-api-key: KEY` and `api-key: KEY`; a repeated field is refused
because two readers of it could see two callers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import Refusal

_PREFIX_BYTES = 4
_KEY_FIELDS = (b"x-api-key", b"api-key")
_CHALLENGE = (("www-authenticate", 'Bearer realm="headrace"'),)


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the keys file. sha256 is the digest of the key, 32 bytes; max_class "" means any."""

    tenant: str
    sha256: bytes
    id: str
    max_class: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request is for. key_id is a short public id, "" without keys."""

    tenant: str
    key_id: str = ""
    max_class: str = ""


ANYBODY = Caller("default")


class KeyRing:
    """The keys in force. Without any, every request is of the tenant "default" and needs none."""

    __slots__ = ("_by_prefix",)

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._by_prefix: dict[bytes, list[Key]] = {}
        for key in keys:
            self._by_prefix.setdefault(key.sha256[:_PREFIX_BYTES], []).append(key)

    def __len__(self) -> int:
        return sum(map(len, self._by_prefix.values()))

    def __repr__(self) -> str:
        return f"<KeyRing {len(self)} keys>"

    def find(self, secret: bytes) -> Caller | None:
        """The caller that holds this key, else None."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for key in self._by_prefix.get(digest[:_PREFIX_BYTES], ()):
            if hmac.compare_digest(key.sha256, digest):
                found = Caller(key.tenant, key.id, key.max_class)
        return found

    def authenticate(self, fields: Iterable[tuple[bytes, bytes]]) -> Caller:
        """The caller of a request with these fields (names lower-case). Raises a 401 Refusal."""
        secret = _credential(fields)
        if not self._by_prefix:
            return ANYBODY
        if secret is None:
            raise _unauthorised("missing API key: send `Authorization: Bearer KEY`", "missing_api_key")
        if not secret:
            raise _unauthorised(
                "no API key after the word Bearer in Authorization: send `Authorization: Bearer KEY`", "invalid_api_key"
            )
        caller = self.find(secret)
        if caller is None:
            raise _unauthorised(
                "incorrect API key provided: check it, or ask whoever runs this gateway for another", "invalid_api_key"
            )
        return caller


def digest(secret: str) -> str:
    """What the keys file holds of a key: its SHA-256 in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _credential(fields: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key's bytes; None when there is none. A scheme other than Bearer is an empty key, which nobody has."""
    given: dict[bytes, bytes] = {}
    for name, value in fields:
        if name == b"authorization" or name in _KEY_FIELDS:
            if name in given:
                raise _unauthorised(f"repeated {name.decode()} field: send one API key", "ambiguous_api_key")
            given[name] = value
    if b"authorization" in given:
        scheme, _, secret = given[b"authorization"].strip().partition(b" ")
        return secret.strip() if scheme.lower() == b"bearer" else b""
    for name in _KEY_FIELDS:
        if name in given:
            return given[name].strip()
    return None


def _unauthorised(message: str, reason: str) -> Refusal:
    return Refusal(401, message, "authentication_error", reason, headers=_CHALLENGE)
