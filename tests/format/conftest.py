from __future__ import annotations

from pathlib import Path

import pytest

from tests.format.builders import copy, small


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small dataset, never to be changed."""
    root = tmp_path_factory.mktemp("pristine") / "out"
    small(root)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return copy(pristine, tmp_path / "out")
