"""Hides which settings and library versions a row's values depend on: the fingerprints of today, and of what was built before.

A row depends on less than a dataset does: how more than 8 bits are handled touches no source of 8 bits, and a library only the formats that it reads.
So rows are judged by kind: the format of their source, and whether that has more than 8 bits a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler import decode, resample
from mmcompile.compiler.plan import fingerprint
from mmcompile.compiler.preprocess import PIXEL_REVISION, Preprocess
from mmcompile.errors import OptionError
from mmcompile.format.index import Index

__all__ = ["Fingerprints", "marks_of", "marks_of_index", "marks_of_made", "of_kinds", "stored_as", "versions_of"]

#: Settings that touch sources of more than 8 bits a channel alone.
_DEEP_ONLY = ("holds", "depth16", "range")
#: ... and JPEGs alone.
_JPEG_ONLY = ("jpeg_scaling",)
_JPEGS = ("JPEG", "MPO")
#: What the kind of a row of such a source ends with.
_DEEP = " deep"
#: What Pillow's modes of more than 8 bits a channel begin with (I, I;16, I;16B, F), and no other.
_DEEP_MODES = np.frombuffer(b"IF", np.uint8)


@dataclass(frozen=True)
class Fingerprints:
    """Of some settings and versions: `pixel` over all formats, `shallow` the same for sources of 8 bits, `store`, and one for each kind of row."""

    pixel: str
    shallow: str
    store: str
    formats: dict[str, str]

    def usable(self, other: dict[str, str]) -> frozenset[str]:
        """The kinds whose rows, made under `other`, are still right."""
        return frozenset(f for f, mark in self.formats.items() if other.get(f) == mark)

    def rejects(self, other: Fingerprints, line: Mapping[str, Any]) -> bool:
        """Would a source that was rejected with this line, under `other`, be rejected with it again?"""
        if not line["source_hash"] or line["code"] == "needs-extra":  # what was missing may have been installed
            return False
        if line["stage"] == "value":
            return False  # the file is not what was wrong
        if line["stage"] in ("open", "load") and line["code"] not in ("unexpected", "decoder-crash"):
            return self.shallow == other.shallow  # nothing has asked for its depth yet
        # What the dtype cannot hold is a matter of the store settings, too.
        return self.pixel == other.pixel and (line["stage"] != "cast" or self.store == other.store)


#: Equal to nothing: of settings that cannot be understood.
_UNKNOWN = Fingerprints("", "", "", {})


def versions_of(preprocess: Preprocess, format: str | None = None) -> dict[str, str]:
    """The library versions that pixels of a source format depend on; of all listed formats when None."""
    found = decode.versions(format, icc=preprocess.icc == "srgb", volumes=preprocess.uses_volumes)
    resized = preprocess.resize is not None or preprocess.pad is not None
    return {**found, **resample.versions()} if resized and preprocess.resolved().resampler == "torch" else found


def marks_of(preprocess: Preprocess, versions: Mapping[str, str], revision: int) -> Fingerprints:
    """The fingerprints of these settings under these library versions (those that are missing count as "")."""
    deep = preprocess.pixel_settings()
    shallow = {name: value for name, value in deep.items() if name not in _DEEP_ONLY}
    formats = {}
    for name in decode.FORMATS:
        own = {k: versions.get(k, "") for k in versions_of(preprocess, None if preprocess.parts else name)}
        for suffix, settings in (("", shallow), (_DEEP, deep)):
            touching = {k: v for k, v in settings.items() if k not in _JPEG_ONLY or name in _JPEGS}
            formats[name + suffix] = fingerprint(touching, own, revision)
    pixel, narrow = (fingerprint(settings, dict(versions), revision) for settings in (deep, shallow))
    return Fingerprints(pixel, narrow, fingerprint(preprocess.store_settings(), {}, revision), formats)


def marks_of_index(index: Index) -> Fingerprints:
    """The fingerprints of a published generation; marks that equal nothing where its settings cannot be understood."""
    return marks_of_made(made_as(index))[0]


def made_as(index: Index) -> dict[str, Any]:
    """What a generation says of how its rows were made, in the form that seals have it."""
    told = {name: index.settings[name] for name, there in (("sha256", index.sha256), ("keys", index.key_hash)) if there and name in index.settings}
    return {"preprocess": index.settings.get("preprocess"), "versions": index.versions, "revision": index.pixel_revision, **told}


def marks_of_made(made: Mapping[str, Any], *, today: Mapping[str, str] | None = None) -> tuple[Fingerprints, Preprocess | None]:
    """The fingerprints of rows made so, and their settings; marks that equal nothing, and None, where those cannot be understood.

    With `today`, the library versions here, the fingerprints that the same settings have under these.
    """
    try:
        preprocess = Preprocess.from_settings(made["preprocess"])
        if today is not None:
            return marks_of(preprocess, today, PIXEL_REVISION), preprocess
        return marks_of(preprocess, made["versions"], made["revision"]), preprocess
    except (OptionError, KeyError, TypeError, ValueError, AttributeError):
        return _UNKNOWN, None


def of_kinds(samples: npt.NDArray[Any], kinds: frozenset[str]) -> npt.NDArray[np.bool_]:
    """Which rows (N,) are of these kinds, by their provenance."""
    mode = np.ascontiguousarray(samples["mode"]).view(np.uint8).reshape(len(samples), samples["mode"].dtype.itemsize)
    deep = np.isin(mode[:, 0], _DEEP_MODES)
    names = [np.array(sorted(k.removesuffix(_DEEP).encode() for k in kinds if k.endswith(_DEEP) == is_deep), "S8") for is_deep in (False, True)]
    usable: npt.NDArray[np.bool_] = np.where(deep, np.isin(samples["format"], names[1]), np.isin(samples["format"], names[0]))
    return usable


def stored_as(old: Preprocess, new: Preprocess) -> str | None:
    """How rows stored as `old` says become those that `new` wants, bit for bit: "same", "moved" (to the other layout), "cast" again from the
    pixels, which uint8 rows are; None where they cannot.  Of a sample of several pictures the first alone may be stored anew.
    """
    of_parts = [{name: p.of(name).store_settings() for name in p.parts} for p in (old, new)]
    if of_parts[0] != of_parts[1]:
        return None
    old, new = replace(old, fields=()), replace(new, fields=())  # what moves with a picture is moved anew
    if old.views or new.views or "volume" in (old.kind, new.kind):
        return "same" if old.store_settings() == new.store_settings() else None
    if old.dtype == "uint8" and new.dtype != "uint8":
        return "cast"
    mine, wanted = ({**p.store_settings(), "layout": None} for p in (old, new))
    if old.dtype != "uint8" and mine != wanted:
        return None
    return "same" if old.layout == new.layout else "moved"
