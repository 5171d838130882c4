"""Which source reads a RAW, and which options it takes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mmcompile.compiler.sources import choose
from mmcompile.compiler.sources.choose import KINDS, Kind, SourceOptions, open_source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import OptionError


def test_each_kind_takes_options_that_there_are() -> None:
    names = {f.name for f in dataclasses.fields(SourceOptions)} - {"source"}
    assert all(kind.takes <= names for kind in KINDS)
    assert set.union(*(set(kind.takes) for kind in KINDS)) == names, "an option that no kind takes"
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_an_option_counts_as_given_when_it_is_not_as_it_is_without_a_word() -> None:
    assert SourceOptions().given() == ()
    assert SourceOptions(source="folder", include=(), hidden=False).given() == ()
    assert SourceOptions(include=("*.png",), hidden=True, compat="torchvision").given() == ("include", "hidden", "compat")


def test_options_that_a_kind_does_not_take_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Kind("bare", lambda raw: raw[0] == "bare", lambda raw, options: pytest.fail("made"), frozenset())
    monkeypatch.setattr(choose, "KINDS", (bare, *KINDS))
    with pytest.raises(
        OptionError, match=r"--include does not go with this RAW, which is read as bare: leave it out, or give another --source \("
    ) as e:
        open_source(["bare"], SourceOptions(include=("*",)))
    assert e.value.details["options"] == ["include"]
    with pytest.raises(OptionError, match=r"--exclude, --hidden do not go with --source bare: leave them out, or ") as e:
        open_source(["raw"], SourceOptions(source="bare", hidden=True, exclude=("x",)))
    assert e.value.details["options"] == ["exclude", "hidden"]
    assert "\n" not in str(e.value)
    monkeypatch.setattr(choose, "KINDS", (bare,))
    with pytest.raises(OptionError, match=r"--compat does not go with --source bare: leave it out$"):
        open_source(["raw"], SourceOptions(source="bare", compat="torchvision"))


def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match=re.escape(", ".join(kind.name for kind in KINDS)) + ", not 'nope'"):
        open_source(["raw"], SourceOptions(source="nope"))


def test_a_folder_is_listed_as_torchvision_lists_it_where_that_is_asked_for(tmp_path: Path) -> None:
    found = open_source([str(tmp_path)], SourceOptions(compat="torchvision"))
    assert isinstance(found, FolderSource)
    assert found.hidden
    assert found.extensions is not None
    assert ".webp" in found.extensions
    plain = open_source([str(tmp_path)], SourceOptions())
    assert isinstance(plain, FolderSource)
    assert not plain.hidden
    assert plain.extensions is None
