"""Hides which settings and library versions a row's values depend on: the fingerprints of today, and of a published generation."""

from __future__ import annotations

from mmcompile.compiler import decode, resample
from mmcompile.compiler.plan import fingerprint
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.previous import Fingerprints
from mmcompile.errors import OptionError
from mmcompile.format.index import Index

__all__ = ["marks_of", "marks_of_index", "versions_of"]


def versions_of(preprocess: Preprocess, format: str | None = None) -> dict[str, str]:
    """The library versions that pixels of a source format depend on; of all listed formats when None."""
    found = decode.versions(format, icc=preprocess.icc == "srgb")
    resized = preprocess.resize is not None or preprocess.pad is not None
    return {**found, **resample.versions()} if resized and preprocess.resolved().resampler == "torch" else found


def marks_of(preprocess: Preprocess, versions: dict[str, str], revision: int) -> Fingerprints:
    """The fingerprints of these settings under these library versions (those that are missing count as "")."""
    settings = preprocess.pixel_settings()
    formats = {}
    for name in decode.FORMATS:
        formats[name] = fingerprint(settings, {k: versions.get(k, "") for k in versions_of(preprocess, name)}, revision)
    return Fingerprints(fingerprint(settings, versions, revision), fingerprint(preprocess.store_settings(), {}, revision), formats)


def marks_of_index(index: Index) -> Fingerprints:
    """The fingerprints of a published generation; marks that equal nothing where its settings cannot be understood."""
    try:
        return marks_of(Preprocess.from_settings(index.settings["preprocess"]), index.versions, index.pixel_revision)
    except (OptionError, KeyError, TypeError, ValueError):
        return Fingerprints("", "", {})
