"""What the tests of a build stand on: small raw folders, builds in this process, and the bytes of a dataset."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcompile.compiler import decode, driver
from mmcompile.compiler.driver import BuildOptions, BuildReport, build
from mmcompile.compiler.preprocess import Preprocess, store
from mmcompile.compiler.rowrun import Here
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.format.npy import file_name
from mmcompile.format.reader import Reader

#: Rows of 8 x 8 x 3 bytes, and no torch in any worker.
SMALL = Preprocess(crop=8)
ROW_BYTES = 8 * 8 * 3 + 8
BROKEN = b"\x89PNG\r\n\x1a\n and nothing behind it"


def picture(seed: int, format: str = "PNG", size: tuple[int, int] = (10, 12), mode: str = "RGB") -> bytes:
    """A file of noise, (width, height) pixels."""
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
    out = io.BytesIO()
    image.save(out, format)
    return out.getvalue()


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def make_raw(root: Path, per_class: int = 6, classes: Iterable[str] = ("cat", "dog"), seed: int = 0) -> Path:
    """Class folders of PNG and JPEG files, some nested."""
    for c, name in enumerate(classes):
        for i in range(per_class):
            format, suffix = (("PNG", "png"), ("JPEG", "jpg"))[i % 2]
            nested = "deep/" if i % 3 == 2 else ""
            write(root, {f"{name}/{nested}{i}.{suffix}": picture(seed + 1000 * c + i, format)})
    return root


def age(root: Path, seconds: float = 100.0) -> None:
    """Make all files old, so that their stat can be trusted (as far as mtime goes)."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            found = os.stat(path)
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - int(seconds * 1e9)))


def run(raw: Any, out: str | Path, preprocess: Preprocess | None = SMALL, *, rows: int = 3, workers: int = 1, **more: Any) -> BuildReport:
    """A build with shards of about `rows` rows of SMALL."""
    options = BuildOptions(workers=workers, shard_bytes=rows * ROW_BYTES, **more.pop("options", {}))
    return build(raw, out, preprocess=preprocess, options=options, **more)


def inline(monkeypatch: Any) -> None:
    """Images are decoded in this process."""
    monkeypatch.setattr(driver, "make_executor", lambda workers: Here())


def dataset(out: Path) -> dict[str, bytes]:
    """The dataset: index.json, its generation, and every file that they name."""
    reader = Reader(out)
    paths = [out / "index.json", out / "generations" / f"{reader.generation}.json", out / "shards" / file_name("table", reader.index.table)]
    for column in reader.table.dtype.names or ():
        if column != "rows":
            paths += [reader.path(column, shard) for shard in range(len(reader.table))]
    if reader.index.rejects_file is not None:
        paths.append(out / "shards" / file_name("rejects", reader.index.rejects_file, ".jsonl"))
    if reader.index.classes_file is not None:
        paths.append(out / "shards" / file_name("classes", reader.index.classes_file, ".json"))
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def images(out: Path) -> npt.NDArray[Any]:
    reader = Reader(out)
    return reader.gather("image", np.arange(len(reader)))


def keys(out: Path) -> list[bytes]:
    reader = Reader(out)
    return [key for shard in range(len(reader.table)) for key in reader.keys(shard)]


def expected(raw: Path, preprocess: Preprocess, keys: list[bytes] | None = None) -> npt.NDArray[Any]:
    """The rows of RAW made one by one, in the order of the scan."""
    source = FolderSource(str(raw))
    made = []
    for key in source.scan().keys if keys is None else keys:
        decoded = decode.decode(source.read(key), os.fsdecode(key), preprocess)
        made.append(store(decoded.pixels, preprocess.resolved(), decoded.depth))
    return np.stack(made)


def snapshot(root: Path) -> dict[str, Any]:
    """Everything below a folder: kind, content, mode, mtime and inode."""
    out: dict[str, Any] = {}
    for folder, names, files in os.walk(root):
        for name in [".", *names, *files]:
            path = os.path.join(folder, name)
            found = os.lstat(path)
            content = os.readlink(path) if os.path.islink(path) else Path(path).read_bytes() if os.path.isfile(path) else None
            out[path] = (found.st_mode, found.st_mtime_ns, found.st_ino, content)
    return out


def shard_stats(out: Path) -> dict[str, tuple[int, int]]:
    """(inode, mtime) of each file of a shard."""
    kinds = ("image-", "label-", "samples-", "keys-")
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "shards").iterdir() if p.name.startswith(kinds)}
