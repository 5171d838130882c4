"""Hides how the name of a source becomes a key that does not show it: the first 32 hex digits of its SHA-256, or of its HMAC-SHA-256 with a secret.

The plain one is a pseudonym and no more: whoever has a list of names can hash them all and see which are there.  With a secret nobody can who does
not have that.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["KEY_HASHES", "hashed_key"]

#: What an index says of its keys: made without a secret, and with one.
KEY_HASHES = ("sha256", "hmac-sha256")
#: Hex digits of a key: two of 10^9 names have the same with a chance of 10^-21.
_DIGITS = 32


def hashed_key(name: bytes, secret: bytes | None = None) -> bytes:
    """The key of a source of this name: 32 hex digits."""
    made = hashlib.sha256(name).hexdigest() if secret is None else hmac.digest(secret, name, "sha256").hex()
    return made[:_DIGITS].encode("ascii")
