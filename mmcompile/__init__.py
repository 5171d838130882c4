"""The public names.  Errors are at hand at once; the rest is loaded on first use, so `import mmcompile` needs neither torch nor Pillow."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmcompile.errors import (
    BuildError,
    CorruptShardError,
    DecodeError,
    EngineError,
    FormatError,
    GenerationError,
    MMCompileError,
    NotADatasetError,
    OptionError,
    OutputExistsError,
    RemoteError,
    ResumeError,
    SourceError,
    VersionError,
)

if TYPE_CHECKING:
    from mmcompile.compiler.driver import build
    from mmcompile.compiler.options import BuildOptions
    from mmcompile.compiler.outcome import BuildReport
    from mmcompile.compiler.preprocess import Normalize, Preprocess
    from mmcompile.compiler.rowstore import RowPreprocess
    from mmcompile.compiler.sources.choose import Raw
    from mmcompile.format.verify import verify
    from mmcompile.runtime.augment import Augment
    from mmcompile.runtime.cache import Cache
    from mmcompile.runtime.dataset import MMapShardDataset
    from mmcompile.runtime.loader import ShardLoader
    from mmcompile.runtime.sampler import ShardSampler
    from mmcompile.runtime.tune import Tuning, tune

    __version__: str

__all__ = [
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

_HOMES = {
    "Augment": "mmcompile.runtime.augment",
    "BuildOptions": "mmcompile.compiler.options",
    "BuildReport": "mmcompile.compiler.outcome",
    "Cache": "mmcompile.runtime.cache",
    "MMapShardDataset": "mmcompile.runtime.dataset",
    "Normalize": "mmcompile.compiler.preprocess",
    "Preprocess": "mmcompile.compiler.preprocess",
    "Raw": "mmcompile.compiler.sources.choose",
    "RowPreprocess": "mmcompile.compiler.rowstore",
    "ShardLoader": "mmcompile.runtime.loader",
    "ShardSampler": "mmcompile.runtime.sampler",
    "Tuning": "mmcompile.runtime.tune",
    "build": "mmcompile.compiler.driver",
    "tune": "mmcompile.runtime.tune",
    "verify": "mmcompile.format.verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib import metadata  # takes longer to import than all of the above

    try:
        return metadata.version("mmcompile")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "0+unknown"
