"""Hides how the name of a source becomes a key that does not show it: the first 32 hex digits of its SHA-256, or of its HMAC-SHA-256 with a secret.

The plain one is a pseudonym and no more: whoever has a list of names can hash them all and see which are there.  With a secret nobody can who does
not have that.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["KEY_DIGITS", "KEY_HASHES", "hashed_key", "key_setting", "sought_key"]

#: What an index says of its keys: made without a secret, and with one.
KEY_HASHES = ("sha256", "hmac-sha256")
#: Hex digits of a key: two of 10^9 names have the same with a chance of 10^-21.
KEY_DIGITS = 32
#: Hashed with a secret it tells one secret from another; no name of a source begins so.
_CHECK = b"/mmcompile/"


def hashed_key(name: bytes, secret: bytes | None = None) -> bytes:
    """The key of a source of this name: 32 hex digits."""
    made = hashlib.sha256(name).hexdigest() if secret is None else hmac.digest(secret, name, "sha256").hex()
    return made[:KEY_DIGITS].encode("ascii")


def key_setting(secret: bytes | None) -> str:
    """What the settings of a dataset say of keys that are made so; not the secret, but enough to know it again."""
    return "hash" if secret is None else f"hash:{hashed_key(_CHECK, secret).decode('ascii')}"


def sought_key(name: bytes, secret: bytes | None, key_hash: str, setting: object) -> bytes:
    """The key that a source of this name has where an index says `key_hash`, and settings `setting`.  Raises ValueError without the right secret."""
    if key_hash != "sha256" and secret is None:
        raise ValueError("its keys are hashed with a secret: give secret=, the bytes of the file that --keys hash:FILE named, or the key itself")
    if key_hash == "sha256" and secret is not None:
        raise ValueError("its keys are hashed without a secret: leave secret= out")
    if secret is not None and isinstance(setting, str) and setting != key_setting(secret):
        raise ValueError("its keys are hashed with another secret: give the bytes of the file that --keys hash:FILE named")
    return hashed_key(name, secret)
