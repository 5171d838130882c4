from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.format.builders import copy, small

# no test of ours depends on the speed of a machine
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
