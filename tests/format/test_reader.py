from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, GenerationError, NotADatasetError
from mmcompile.format import opened, region
from mmcompile.format import reader as reader_module
from mmcompile.format.index import DTYPES, load_index
from mmcompile.format.npy import ALIGN
from mmcompile.format.reader import Reader
from tests.format.builders import file_of, pixels, small, tree
from tests.support import in_threads, make_dataset

ENGINES = ["mmap", "pread"]
IMAGES = pixels(12)


@pytest.fixture(params=ENGINES)
def reader(request: pytest.FixtureRequest, pristine: Path) -> Reader:
    return Reader(pristine, engine=request.param)


@given(st.lists(st.integers(0, 11), max_size=30), st.sampled_from(ENGINES), st.sampled_from(["image", "label"]), st.booleans())
def test_gather_equals_indexing_the_concatenation(pristine: Path, rows: list[int], engine: str, field: str, big: bool) -> None:
    reader = Reader(pristine, engine=engine)
    every = {"image": IMAGES, "label": np.arange(12) % 3}[field]
    found = reader.gather(field, np.array(rows, np.int64))
    assert found.dtype == every.dtype
    assert (found == every[rows]).all()
    out = np.empty((len(rows), *every.shape[1:]), every.dtype)
    assert reader.gather(field, np.array(rows, np.int64), out) is out
    assert (out == every[rows]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_larger_than_a_page_are_gathered_the_same(tmp_path: Path, engine: str) -> None:
    images = pixels(5, shape=(3, 50, 60))
    make_dataset(tmp_path / "out", images, shards=(2, 3))
    rows = np.array([4, 0, 0, 3, 1])
    assert (Reader(tmp_path / "out", engine=engine).gather("image", rows) == images[rows]).all()


def test_rows_views_and_columns_agree(reader: Reader) -> None:
    assert len(reader) == 12
    assert (np.concatenate([reader.view("image", s) for s in range(3)]) == IMAGES).all()
    assert (np.stack([reader.row("image", i) for i in range(12)]) == IMAGES).all()
    assert (reader.column("image") == IMAGES).all()
    assert [int(reader.row("label", i)) for i in range(12)] == [0, 1, 2] * 4
    assert reader.classes == ("class 0", "class 1", "class 2")


def test_every_row_lies_where_the_table_of_the_format_says(reader: Reader) -> None:
    assert reader.starts.tolist() == [0, 5, 9, 12]
    assert [reader.locate(i) for i in (0, 4, 5, 8, 9, 11)] == [(0, 0), (0, 4), (1, 0), (1, 3), (2, 0), (2, 2)]


def test_a_write_to_a_row_stays_in_this_process_and_out_of_batches(pristine: Path) -> None:
    before = tree(pristine)
    reader = Reader(pristine, engine="mmap")
    reader.row("image", 3)[...] = 7
    assert (reader.row("image", 3) == 7).all()
    assert (reader.gather("image", np.array([3])) == IMAGES[3]).all()
    assert (reader.column("image") == IMAGES).all()
    assert tree(pristine) == before


def test_a_row_that_was_read_is_a_copy_of_ones_own(pristine: Path) -> None:
    reader = Reader(pristine, engine="pread")
    reader.row("image", 3)[...] = 7
    assert (reader.row("image", 3) == IMAGES[3]).all()


def test_no_descriptor_is_held_by_maps(pristine: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = Reader(pristine, engine="mmap")
    reader.gather("image", np.arange(12))
    reader.view("label", 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_views_stay_valid_after_their_map_was_evicted(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "_MAPS", 1)
    reader = Reader(pristine, engine="mmap")
    views = [reader.row("image", i) for i in range(12)]
    assert len(reader._opened.maps) == 1
    reader.close()
    del reader
    gc.collect()
    assert (np.stack(views) == IMAGES).all()


def test_descriptors_are_few_and_go_with_the_reader(pristine: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = Reader(pristine, engine="pread")
    reader._opened.most_files = 2
    reader.gather("image", np.arange(12))
    reader.gather("label", np.arange(12))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    reader.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (reader.gather("image", np.arange(12)) == IMAGES).all()


def test_it_pickles_small_as_path_and_generation(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    reader = Reader("out")
    data = pickle.dumps(reader)
    assert len(data) < 500
    small(root, seed=5)
    monkeypatch.chdir("/")
    again = pickle.loads(data)
    assert again.generation == reader.generation != Reader(root).generation
    assert (again.column("image") == IMAGES).all()


def _sum(reader: Reader) -> int:
    return int(reader.gather("image", np.arange(12)).sum())


@pytest.mark.parametrize(("method", "engine"), [("fork", "mmap"), ("fork", "pread"), ("spawn", "mmap"), ("forkserver", "pread")])
def test_it_works_in_other_processes(pristine: Path, method: str, engine: str) -> None:
    reader = Reader(pristine, engine=engine)
    expected = _sum(reader)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_sum, [reader] * 4) == [expected] * 4


def test_it_works_on_after_a_fork(reader: Reader) -> None:
    reader.gather("image", np.arange(5))
    pid = os.fork()
    if not pid:
        os._exit(0 if (reader.gather("image", np.arange(12)) == IMAGES).all() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert (reader.gather("image", np.arange(12)) == IMAGES).all()


def test_threads_may_share_it(pristine: Path) -> None:
    for engine in ENGINES:
        reader = Reader(pristine, engine=engine)
        reader._opened.most_files = 2
        faults: list[Any] = []

        def work(seed: int, reader: Reader = reader, faults: list[Any] = faults) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(100):
                rows = rng.integers(0, 12, 5)
                if not (reader.gather("image", rows) == IMAGES[rows]).all() or not (reader.row("image", rows[0]) == IMAGES[rows[0]]).all():
                    faults.append(rows)

        in_threads(work)
        assert faults == []


def test_reading_writes_nothing(root: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in [root, *root.rglob("*")]}
    for engine in ENGINES:
        reader = Reader(root, engine=engine)
        reader.gather("image", np.arange(12))
        reader.row("image", 0)[...] = 1
        reader.keys(0)
    assert {p: p.stat().st_mtime_ns for p in [root, *root.rglob("*")]} == before


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_every_dtype_and_layout_comes_back(tmp_path: Path, dtype: str, layout: str) -> None:
    images = (np.arange(2 * 2 * 3 * 4).reshape(2, 2, 3, 4) % 2).astype(DTYPES[dtype])
    make_dataset(tmp_path / "out", images, layout=layout, dtype=dtype)
    reader = Reader(tmp_path / "out")
    expected = images if layout == "chw" else images.transpose(0, 2, 3, 1)
    assert (reader.column("image") == expected).all()
    assert reader.index.fields[0].sample_shape == (2, 3, 4)


def test_an_empty_dataset_has_no_rows(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", pixels(0), [])
    reader = Reader(tmp_path / "out")
    assert len(reader) == 0
    assert reader.column("image").shape == (0, 3, 4, 5)
    assert reader.gather("image", np.array([], np.int64)).shape == (0, 3, 4, 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_damage_is_an_error_at_first_use_that_names_the_file(root: Path, engine: str) -> None:
    path = file_of(root, "image", 1)
    data = path.read_bytes()
    for bad in (data[:-1], data + b"x", data[: ALIGN - 1], b"\0" + data[1:]):
        path.write_bytes(bad)
        reader = Reader(root, engine=engine)
        assert (reader.gather("image", np.array([0, 11])) == IMAGES[[0, 11]]).all()
        for use in (
            lambda r: r.row("image", 5),
            lambda r: r.view("image", 1),
            lambda r: r.gather("image", np.array([6])),
            lambda r: r.column("image"),
        ):
            with pytest.raises(CorruptShardError, match=path.name):
                use(reader)
    path.unlink()
    with pytest.raises(CorruptShardError, match="missing"):
        Reader(root, engine=engine).row("image", 5)


def test_a_file_cut_under_an_open_pread_reader_is_an_error(root: Path) -> None:
    reader = Reader(root, engine="pread")
    reader.row("image", 5)
    os.truncate(file_of(root, "image", 1), ALIGN + 10)
    with pytest.raises(CorruptShardError, match="ends at byte"):
        reader.row("image", 6)


def test_generations_are_told_apart(root: Path) -> None:
    first = load_index(root)[1]
    second = small(root, seed=1)
    assert Reader(root).generation == second
    assert Reader(root, generation=second).generation == second
    assert (Reader(root, generation=first).column("image") == IMAGES).all()
    for bad in ("0" * 32, "x", "", "../index", "0" * 31 + "\n"):
        with pytest.raises(GenerationError):
            Reader(root, generation=bad)


def test_a_folder_that_is_no_dataset_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "unfinished" / ".build").mkdir(parents=True)
    for name, said in ((".", "no index.json"), ("absent", "no such folder"), ("file", "not a folder"), ("unfinished", "not finished")):
        with pytest.raises(NotADatasetError, match=said):
            Reader(tmp_path / name)
    with pytest.raises(ValueError, match="engine"):
        Reader(tmp_path, engine="x")


@pytest.mark.parametrize(("kind", "engine"), [(b"ext4", "mmap"), (b"nfs4", "pread"), (b"fuse.sshfs", "pread"), (b"overlay", "mmap")])
def test_media_that_can_fail_later_are_read_not_mapped(pristine: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes, engine: str) -> None:
    real = Path.read_bytes
    mounts = b"1 0 0:1 / / rw - xfs /dev/a rw\n2 1 0:2 / " + os.fsencode(pristine.parent) + b" rw - " + kind + b" x rw\n"
    monkeypatch.setattr(Path, "read_bytes", lambda self: mounts if str(self) == "/proc/self/mountinfo" else real(self))
    assert Reader(pristine).engine == engine


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_are_told_and_found(tmp_path: Path, engine: str) -> None:
    keys = [b"a", b"", b"b\xff/c.png", b"a/b", b"x" * 500, b"z"]
    make_dataset(tmp_path / "out", pixels(6), shards=(1, 3, 2), keys=keys)
    reader = Reader(tmp_path / "out", engine=engine)
    assert [key for shard in range(3) for key in reader.keys(shard)] == keys
    assert [reader.key(i) for i in range(6)] == keys
    assert [reader.find(key) for key in keys] == list(range(6))
    with pytest.raises(KeyError):
        reader.find(b"absent")


# --- cold data ---


def evict(root: Path) -> None:
    """Drop the images from the page cache; skips where the file system keeps them there."""
    for path in (root / "shards").glob("image-*"):
        with open(path, "rb+") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:
                pass
            pytest.skip("this file system keeps its files in memory")


@pytest.fixture
def cold_root(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "out", pixels(40, shape=(3, 100, 120)), shards=(13, 7, 20))
    evict(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_cold_rows_are_told_and_read_ahead_by_advice(cold_root: Path, engine: str, single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if single:
        monkeypatch.setattr(region, "_SHARDS", 0)
    reader = Reader(cold_root, engine=engine)
    rows = np.array([3, 39, 14, 30, 3, 21, 0, 17, 25, 8])
    assert reader.cold("image", rows)
    assert reader.cold("image", rows[:1], sample=1)
    reader.advise("image", rows)
    end = time.monotonic() + 60
    while reader.cold("image", rows, sample=len(rows)):
        assert time.monotonic() < end
    assert not reader.cold("image", rows[:0])
    reader.advise("image", rows[:0])


@pytest.mark.parametrize("engine", ENGINES)
def test_warming_reads_just_the_rows_and_tells_their_bytes(cold_root: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_PIECE", 100_000)
    reader = Reader(cold_root, engine=engine)
    seen: list[int] = []
    reader.warm(["image"], range(5, 25), lambda: False, seen.append)
    assert sum(seen) == 20 * 36_000
    assert max(seen) <= 100_000
    assert not reader.cold("image", np.arange(5, 25), sample=20)
    seen.clear()
    reader.warm(["image"], range(40), lambda: len(seen) == 2, seen.append)
    assert len(seen) == 2
    reader.warm(["image"], range(3, 3), lambda: False, seen.append)
    assert len(seen) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_advice_about_a_damaged_file_is_silent_and_warming_is_not(root: Path, engine: str) -> None:
    os.truncate(file_of(root, "image", 1), ALIGN)
    reader = Reader(root, engine=engine)
    rows = np.arange(12)
    reader.advise("image", rows)
    assert not reader.cold("image", rows)
    with pytest.raises(CorruptShardError, match=file_of(root, "image", 1).name):
        reader.warm(["image"], range(12), lambda: False, lambda n: None)
