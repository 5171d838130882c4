from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.canonical import read_limited
from mmcompile.format.catalog import digest_file
from mmcompile.format.index import load_index
from mmcompile.format.npy import ALIGN, file_name, header, open_array, read_into
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.format.builders import REPOSITORY, change_index, file_of, pixels, put_table
from tests.support import make_dataset

IMAGES = pixels(12)


def _one_more() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Every file that may be open is open."""
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    held = []
    try:
        while (fd := _one_more()) is not None:
            held.append(fd)
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_no_file_is_called_damaged_because_descriptors_ran_out(root: Path, engine: str) -> None:
    reader = Reader(root, engine=engine)
    with no_descriptor_left():
        for use in (
            lambda: reader.gather("image", np.array([6])),
            lambda: reader.row("image", 6),
            lambda: reader.column("label"),
            lambda: reader.keys(1),
            lambda: reader.key(6),
            lambda: reader.warm(["image"], range(12), lambda: False, lambda n: None),
        ):
            with pytest.raises(OSError, match="ulimit -n") as caught:
                use()
            assert caught.value.errno == errno.EMFILE
            assert not isinstance(caught.value, FormatError)
            assert str(root) in str(caught.value)
        assert not reader.cold("image", np.array([6]))
        reader.advise("image", np.array([6]))
        for plain in (
            lambda: Reader(root),
            lambda: open_array(file_of(root, "image"), np.dtype("u1"), (1,)),
            lambda: digest_file(root / "index.json"),
            lambda: read_limited(root / "index.json", 1 << 20),
            lambda: verify(root),
        ):
            with pytest.raises(OSError, match="Too many open files") as caught:
                plain()
            assert not isinstance(caught.value, FormatError)
    assert (reader.gather("image", np.arange(12)) == IMAGES).all()


def test_descriptors_held_here_make_room_for_another(root: Path) -> None:
    reader = Reader(root, engine="pread")
    reader.gather("image", np.array([0, 11]))
    with no_descriptor_left():
        assert (reader.gather("image", np.array([6])) == IMAGES[6]).all()
        assert len(reader._opened.files) == 1


def test_a_failed_read_names_the_file_and_an_interrupted_one_does_not_blame_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = np.empty(4, np.uint8)
    for code, kind in ((errno.EIO, CorruptShardError), (errno.ENOMEM, OSError), (errno.EINTR, OSError)):

        def fail(*_: object, code: int = code) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(kind, match=str(tmp_path)) as caught:
            read_into(0, out, 0, tmp_path)
        assert isinstance(caught.value, FormatError) == (kind is CorruptShardError)


# --- opening ---

MEASURED = """
import re, sys, time
import numpy, xxhash
from pathlib import Path
from mmcompile.errors import FormatError
from mmcompile.format.reader import Reader
def kib(name): return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
start = time.perf_counter()
try:
    reader = Reader(sys.argv[1])
    print(reader.locate(len(reader) - 1), len(reader), end=" ")
except FormatError as error:
    print(error)
print(round((time.perf_counter() - start) * 1000), kib("VmHWM") - before)
"""


def open_measured(root: Path) -> list[str]:
    """What opening said, then milliseconds and KiB of memory at its most."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", MEASURED, root], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout.split()


def large(root: Path, shards: int) -> None:
    """A dataset of 224 x 224 x 3 images that is index and table alone."""
    make_dataset(root, pixels(1, shape=(3, 224, 224)), np.zeros(1, np.int64))
    index, _ = load_index(root)
    table = np.frombuffer(np.random.default_rng(0).bytes(index.table_dtype().itemsize * shards), index.table_dtype()).copy()
    table["rows"] = 1786
    put_table(root, table, samples=1786 * shards, splits=(type(index.splits[0])("all", 0, 1786 * shards),), statistics={})


def test_a_billion_rows_are_opened_in_little_memory(tmp_path: Path) -> None:
    large(tmp_path, 560_000)
    said = open_measured(tmp_path)
    assert "".join(said[:3]) == f"(559999,1785){560_000 * 1786}"
    assert int(said[-1]) < 100 << 10


@pytest.mark.parametrize("shards", [10**7, 1 << 30])
def test_a_table_that_is_a_hole_is_refused_before_it_takes_memory(root: Path, shards: int) -> None:
    index, _ = load_index(root)
    dtype = index.table_dtype()
    path = root / "shards" / file_name("table", "0" * 32)
    path.write_bytes(header(dtype, (shards,)))
    os.truncate(path, ALIGN + shards * dtype.itemsize)
    change_index(
        root,
        lambda v: v.update(samples=shards, shards=shards, table="0" * 32, splits=[{"name": "all", "start": 0, "stop": shards}], statistics={}),
    )
    said = open_measured(root)
    assert "a hole at byte 4,096 of" in " ".join(said)
    assert int(said[-1]) < 20 << 10
