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
