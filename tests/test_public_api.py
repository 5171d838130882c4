"""The public names, exactly."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import mmcompile
from mmcompile import errors

PUBLIC = [
    "Augment",
    "BuildError",
    "BuildOptions",
    "BuildReport",
    "Cache",
    "CorruptShardError",
    "DecodeError",
    "EngineError",
    "FormatError",
    "GenerationError",
    "MMCompileError",
    "MMapShardDataset",
    "Normalize",
    "NotADatasetError",
    "OptionError",
    "OutputExistsError",
    "Preprocess",
    "Raw",
    "RemoteError",
    "ResumeError",
    "RowPreprocess",
    "ShardLoader",
    "ShardSampler",
    "SourceError",
    "Tuning",
    "VersionError",
    "__version__",
    "build",
    "tune",
    "verify",
]


def test_public_names_are_these_and_sorted() -> None:
    assert mmcompile.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(errors.__all__) < set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_listed_and_documented(name: str) -> None:
    value = getattr(mmcompile, name)
    assert name in dir(mmcompile)
    if name != "__version__":
        assert value.__module__.startswith("mmcompile.")
        assert value.__name__ == name
        assert value.__doc__
        assert getattr(mmcompile, name) is value


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from mmcompile import *", names)
    assert set(PUBLIC) <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mmcompile' has no attribute 'MmapShardDataset'"):
        _ = mmcompile.MmapShardDataset
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from mmcompile import nothing")


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_survive_pickling_with_their_facts(name: str) -> None:
    kind = getattr(mmcompile, name)
    error = pickle.loads(pickle.dumps(kind("a line, with the remedy", path="x\udcff", row=3)))
    assert type(error) is kind
    assert (str(error), error.details) == ("a line, with the remedy", {"path": "x\udcff", "row": 3})
    assert isinstance(error, errors.MMCompileError)


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mmcompile", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "build" in done.stdout
