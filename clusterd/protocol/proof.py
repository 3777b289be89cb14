"""Challenge and response: proof that a peer knows a shared key, without sending the key.

The side that is asked sends a nonce; the side that asks answers with a MAC over the nonce and over what it asks for.
Runs on hosts: standard library only, Python 3.10.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

CHALLENGE_BYTES_MAX = 4096
"""Longest frame of a peer that has not proved anything yet."""


def new_nonce() -> str:
    """A nonce for one challenge."""
    return secrets.token_hex(16)


def proof(key: str, *parts: object) -> str:
    """MAC over `parts` under `key`; the first part names the purpose, so that no proof serves another one."""
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    texts = [str(part).encode() for part in parts]
    message = b"".join(b"%d:%s" % (len(text), text) for text in texts)
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def proves(key: str, given: object, *parts: object) -> bool:
    """True if `given` is the proof over `parts`. Nothing proves an empty key, which everybody knows."""
    return bool(key) and isinstance(given, str) and hmac.compare_digest(proof(key, *parts).encode(), given.encode())
