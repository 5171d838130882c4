"""What most tests of a build begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler.builds import make_raw


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A small RAW: two classes, twelve images."""
    return make_raw(tmp_path / "raw")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where OUT may be made."""
    return tmp_path / "out"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where work folders are; at the end none is left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder
