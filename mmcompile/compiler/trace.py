"""Hides what rows tell of their sources beside what they always do: a hash that shows tampering, and keys that do not show names.

Everything in a build goes by the names of sources, so neither the order of rows nor a cut depends on this; names become keys where they are written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmcompile.compiler.options import BuildOptions
from mmcompile.compiler.sources import Lent, Scan
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.parts import name_of
from mmcompile.errors import OptionError
from mmcompile.format.canonical import name_to_json
from mmcompile.format.index import Index
from mmcompile.format.keyhash import hashed_key, key_setting

__all__ = ["PLAIN", "Trace", "kept_keys", "made_trace", "source_sha256"]

#: A secret that can be guessed hides nothing: as many bytes as a key has.
_LEAST = 16


@dataclass(frozen=True)
class Trace:
    """`sha256`: rows hold that of their source.  `keys`: what settings say of how keys are made, None where they are the names.

    `hashing`: names are hashed here, with `secret` where there is one; else they are keys already, as those of a dataset that is copied from.
    `nameless`: some of these are hashes, which do not tell what a file was called.
    """

    sha256: bool = False
    keys: str | None = None
    hashing: bool = False
    nameless: bool = False
    secret: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, options: BuildOptions, lent: Lent | None) -> Trace:
        """What options ask for; rows of datasets keep what they have.  Raises OptionError."""
        sha256, kept = (options.sha256, None) if lent is None else (lent.sha256, lent.keys)
        if options.sha256 and not sha256:
            raise OptionError(
                "--sha256: the rows are of a dataset without it, and sources are not read again: build that with it", options=["sha256"]
            )
        made = cls(sha256, kept, nameless=lent is not None and lent.nameless)
        if options.keys == "plain":
            return made
        file = options.keys.partition(":")[2]
        secret = _secret(file) if file else None
        asked = replace(made, keys=key_setting(secret), hashing=True, secret=secret)
        if kept is None or kept == asked.keys:
            return asked if kept is None else made
        raise OptionError("--keys: the rows are of a dataset whose keys are hashed already, in another way: leave it out", options=["keys"])

    @property
    def settings(self) -> dict[str, Any]:
        """What the settings of a dataset say; nothing where nothing was asked for."""
        return {**({"sha256": True} if self.sha256 else {}), **({} if self.keys is None else {"keys": self.keys})}

    @property
    def key_hash(self) -> str | None:
        """What the index says of its keys."""
        return None if self.keys is None else "sha256" if self.keys == "hash" else "hmac-sha256"

    @property
    def mark(self) -> str:
        """What tells shards made so from others; nothing where nothing was asked for."""
        return "".join(f" {name}={value}" for name, value in self.settings.items())

    @property
    def told(self) -> bool:
        """Is it known how names become keys?  Not where there is a secret, of what was made earlier."""
        return not self.hashing or self.secret is not None or self.keys == "hash"

    def key(self, name: bytes) -> bytes:
        """The key of a source."""
        return hashed_key(name, self.secret) if self.hashing else name

    def keys_of(self, names: Keys) -> Keys:
        """The keys of sources."""
        return Keys.of(map(self.key, names.bare)) if self.hashing else names

    def seen(self, scan: Scan, source: Mapping[str, object]) -> Scan:
        """A scan whose faults, "field: value, what is wrong", may be written: a value may be a name, too.  Warns of settings that may show names."""
        if not self.hashing:
            return scan
        faults = {at: f"{said.partition(':')[0]}: a value that does not fit" for at, said in scan.faults.items()}
        shown = [f"--{name}" for name in ("include", "exclude", "where") if source.get(name)]
        warning = f"--keys hash: the dataset's settings hold {' and '.join(shown)} as given: if names stand there, they are shown"
        return replace(scan, faults=faults, warnings=(*scan.warnings, *[warning] * bool(shown)))

    def called(self, name: bytes) -> str:
        """ " (NAME)", for a message; nothing where names are kept out."""
        return "" if self.hashing else f" ({name_of(name)})"

    def named(self, line: dict[str, Any], name: bytes) -> dict[str, Any]:
        """The line of a reject for a person at this machine, who has to find the file."""
        return {**line, "key": name_to_json(name)} if self.hashing else line


#: Nothing was asked for.
PLAIN = Trace()


def kept_keys(index: Index) -> str | None:
    """What the settings of a dataset say of its keys; None where they are the names of sources."""
    found = index.settings.get("keys")
    return found if index.key_hash is not None and isinstance(found, str) else None


def made_trace(index: Index) -> Trace:
    """How a dataset was made, so far as its index tells: with hashes for keys, but not with which secret."""
    return Trace(index.sha256, kept_keys(index), index.key_hash is not None)


def source_sha256(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """SHA-256 of the bytes of a source, uint8 (32,)."""
    return np.frombuffer(hashlib.sha256(data).digest(), np.uint8)


def _secret(file: str) -> bytes:
    try:
        secret = Path(file).read_bytes()
    except OSError as error:
        raise OptionError(f"--keys hash:{file}: its secret cannot be read ({error.strerror or error})", options=["keys"]) from None
    if len(secret) < _LEAST:
        raise OptionError(
            f"--keys hash:{file}: expected a file of at least {_LEAST} random bytes, found {len(secret)}: `openssl rand -hex 32 > {file}` makes one",
            options=["keys"],
        )
    return secret
