from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError
from mmcompile.format import npy
from mmcompile.format import region as region_module
from mmcompile.format.npy import ALIGN
from mmcompile.format.reader import Reader
from mmcompile.format.region import Region, page_runs
from tests.format.builders import REPOSITORY, file_of, pixels
from tests.support import make_dataset

IMAGES = pixels(12)


def mapped_files(root: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(root) in line]


def use_singles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_SHARDS", 0)


# --- gathering ---


@pytest.mark.parametrize("row_bytes", [1, 3, 7, 20, 4095, 4096, 4097])
@pytest.mark.parametrize("single", [False, True])
def test_rows_of_any_size_in_many_shards_equal_the_concatenation(
    tmp_path: Path, row_bytes: int, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if single:
        use_singles(monkeypatch)
    shards = (1, 2, 5, 1, 1, 9, 3) * 6
    images = pixels(sum(shards), shape=(1, 1, row_bytes))
    make_dataset(tmp_path, images, shards=shards)
    reader = Reader(tmp_path, engine="mmap")
    rng = np.random.default_rng(0)
    for _ in range(20):  # cold, in part placed, and in the end all
        rows = rng.integers(0, len(images), 12)
        assert (reader.flat("image", rows) is None) == single
        assert (reader.gather("image", rows) == images[rows]).all()
    every = rng.permutation(len(images))
    for _ in range(2):
        assert (reader.gather("image", every) == images[every]).all()


@pytest.mark.parametrize(("dtype", "shape"), [("uint8", (3, 224, 224)), ("float64", (1, 1, 1)), ("float16", (2, 5, 7)), ("bool", (1, 3, 3))])
def test_dtypes_keep_their_bytes(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    images = pixels(9, shape=shape).astype(dtype)
    make_dataset(tmp_path, images, shards=(2, 1, 3, 3))
    rows = np.array([8, 0, 2, 2, 5, 3])
    found = Reader(tmp_path, engine="mmap").gather("image", rows)
    assert found.dtype == images.dtype
    assert found.tobytes() == images[rows].tobytes()


@pytest.mark.parametrize("kind", ["region", "single", "pread"])
def test_a_part_of_each_row_is_that_part_of_the_concatenation(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "single":
        use_singles(monkeypatch)
    images = pixels(9, shape=(3, 40, 50))
    make_dataset(tmp_path, images, shards=(2, 4, 3))
    reader = Reader(tmp_path, engine="pread" if kind == "pread" else "mmap")
    rows = np.array([8, 0, 2, 2, 5])
    cut = (slice(0, 3), slice(3, 21), slice(7, 50))
    assert (reader.gather("image", rows, region=cut) == images[rows][:, :, 3:21, 7:50]).all()
    assert reader.gather("image", rows[:0], region=cut).shape == (0, 3, 18, 43)


def test_the_one_array_holds_each_row_where_it_is_said(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES, shards=(5, 4, 3))
    reader = Reader(tmp_path, engine="mmap")
    rows = np.array([11, 0, 5, 4])
    found = reader.flat("image", rows)
    assert found is not None
    flat, at = found
    assert not flat.flags.writeable
    assert at.dtype == np.int64
    assert [flat[i].tobytes() for i in at.tolist()] == [IMAGES[i].tobytes() for i in rows]
    assert Reader(tmp_path, engine="pread").flat("image", rows) is None


def test_a_row_outside_the_dataset_is_no_row(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES, shards=(5, 4, 3))
    for engine in ("mmap", "pread"):
        reader = Reader(tmp_path, engine=engine)
        for rows in ([0, 12], [-1], [1 << 62, 0]):
            for use in (reader.gather, reader.flat, reader.advise, reader.cold):
                with pytest.raises(IndexError, match="of a dataset of 12"):
                    use("image", np.array(rows))


def test_shards_of_equal_content_share_a_file(tmp_path: Path) -> None:
    images = np.concatenate([IMAGES[:4]] * 3)
    make_dataset(tmp_path, images, shards=(4, 4, 4))
    assert file_of(tmp_path, "image", 0) == file_of(tmp_path, "image", 2)
    rows = np.array([11, 0, 7, 4])
    assert (Reader(tmp_path, engine="mmap").gather("image", rows) == images[rows]).all()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 6), st.data())
def test_rows_are_found_with_and_without_buckets(sizes: list[int], bits: int, data: st.DataObject) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = np.array(data.draw(st.lists(st.integers(0, int(starts[-1]) - 1))), np.int64)
    shards = np.searchsorted(starts, rows, side="right") - 1
    with pytest.MonkeyPatch.context() as patch, open(os.devnull) as null:
        patch.setattr(region_module, "_BUCKET_BITS", bits)
        patch.setattr(npy, "_map", lambda address, *_: address or 1 << 40)
        patch.setattr(npy, "_give_back", lambda address, length, lost, released: released())
        region = Region(starts, np.dtype("u1"), (3,))
        expected = region.first[shards] + rows - starts[shards]
        found, missing = region.find(rows)
        assert found.tolist() == expected.tolist()
        assert list(missing) == list(dict.fromkeys(shards.tolist()))
        for shard in range(len(sizes)):
            assert region.place(shard, null.fileno(), ALIGN)
        found, missing = region.find(rows)
        assert found.tolist() == expected.tolist()
        assert list(missing) == []
        ends = (region.first + np.array(sizes)) * 3
        assert (region.first * 3 % ALIGN == 0).all()
        assert (region.first[1:] * 3 >= ends[:-1]).all()
        space = weakref.ref(region._space)
        del region
        assert space() is None  # while it is given back to nobody


# --- limits ---


def test_regions_of_all_readers_together_stay_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    taken = sum(n for n, _ in region_module._living.values())
    monkeypatch.setattr(region_module, "_SHARDS", taken + 5)
    make_dataset(tmp_path, IMAGES, np.arange(12) % 3, shards=(5, 4, 3))
    rows = np.arange(12)
    first = Reader(tmp_path, engine="mmap")
    assert first.flat("image", rows) is not None
    assert first.flat("label", rows) is None
    second = Reader(tmp_path, engine="mmap")
    assert second.flat("image", rows) is None
    assert (second.gather("image", rows) == IMAGES).all()
    del first
    gc.collect()
    second.close()
    assert second.flat("image", rows) is not None


def test_addresses_go_when_the_last_view_does(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES, shards=(5, 4, 3))
    living = len(region_module._living)
    reader = Reader(tmp_path, engine="mmap")
    found = reader.flat("image", np.arange(12))
    assert found is not None
    row = found[0][int(found[1][7])]
    reader.close()
    del reader, found
    gc.collect()
    assert len(mapped_files(tmp_path)) == 3
    assert (row == IMAGES[7]).all()
    del row
    gc.collect()
    assert mapped_files(tmp_path) == []
    assert len(region_module._living) == living


def refuse(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    real = npy._map

    def fake(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
        if refused(flags):
            raise OSError(errno.ENOMEM, "cannot map")
        return real(address, length, protection, flags, fd, offset)

    monkeypatch.setattr(npy, "_map", fake)


def test_a_shard_that_finds_no_place_is_mapped_alone_and_its_place_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path, IMAGES, shards=(5, 4, 3))
    reader = Reader(tmp_path, engine="mmap")
    assert reader.flat("image", np.array([0])) is not None
    refuse(monkeypatch, lambda flags: flags & npy._FIXED)
    for _ in range(2):
        assert reader.flat("image", np.array([6])) is None
        assert reader.flat("image", np.array([0])) is not None
        assert (reader.gather("image", np.array([6, 0, 11])) == IMAGES[[6, 0, 11]]).all()
    region = reader._regions["image"]
    assert region is not None
    start = region._space.address + int(region.first[1]) * IMAGES[0].nbytes
    del region
    unmapped: list[tuple[int, int]] = []
    monkeypatch.setattr(npy.libc(), "munmap", lambda address, length: unmapped.append((address, length)))
    reader._regions.clear()
    gc.collect()
    assert len(unmapped) == 2
    assert unmapped[0][0] + unmapped[0][1] == start
    assert unmapped[1][0] == start + ALIGN
    monkeypatch.undo()
    for address, length in unmapped:
        assert npy.libc().munmap(address, length) == 0


def test_where_nothing_can_be_mapped_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = pixels(4, shape=(3, 50, 60))
    make_dataset(tmp_path / "small", IMAGES, shards=(5, 4, 3))
    make_dataset(tmp_path / "big", big, shards=(1, 3))
    refuse(monkeypatch, lambda flags: True)
    assert (Reader(tmp_path / "small", engine="mmap").gather("image", np.arange(12)) == IMAGES).all()
    reader = Reader(tmp_path / "big", engine="mmap")
    assert (reader.gather("image", np.arange(4)) == big).all()
    assert (reader.gather("image", np.arange(4), region=(slice(0, 3), slice(2, 9), slice(0, 5))) == big[:, :, 2:9, :5]).all()
    reader.advise("image", np.arange(4))
    assert not reader.cold("image", np.arange(4))
    with pytest.raises(OSError, match="engine='pread'") as caught:
        reader.row("image", 0)
    assert caught.value.errno == errno.ENOMEM


LIMITED = """
import re, resource, sys
import numpy as np
from mmcompile.format.reader import Reader
reader = Reader(sys.argv[1], engine="mmap")
rows = np.array([7, 0, 3, 11])
out = np.empty((4, 3, 1000, 1000), np.uint8)
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[2]),) * 2)
assert reader.flat("image", rows) is None
reader.gather("image", rows, out)
print(len(reader._opened.maps), len(reader._opened.files), out[:, 0, 0, 0].tolist(), out[:, 2, 999, 999].tolist())
"""


@pytest.mark.parametrize(("room", "held"), [(30 << 20, "1 0"), (4 << 20, "0 3")])
def test_a_limit_of_addresses_is_kept(tmp_path: Path, room: int, held: str) -> None:
    images = np.zeros((12, 3, 1000, 1000), np.uint8) + np.arange(12, dtype=np.uint8)[:, None, None, None]
    make_dataset(tmp_path, images, shards=(4, 4, 4))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path, str(room)], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{held} [7, 0, 3, 11] [7, 0, 3, 11]"


# --- damage, threads ---


def test_a_short_shard_is_named_in_the_order_of_the_rows_and_harms_no_other(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES, shards=(5, 4, 3))
    whole = file_of(tmp_path, "image", 2).read_bytes()
    for shard in (1, 2):
        os.truncate(file_of(tmp_path, "image", shard), ALIGN + 20)
    reader = Reader(tmp_path, engine="mmap")
    out = np.zeros((3, 3, 4, 5), np.uint8)
    for rows, shard in (([0, 6, 11], 1), ([11, 6, 0], 2)):
        with pytest.raises(CorruptShardError, match=file_of(tmp_path, "image", shard).name):
            reader.gather("image", np.array(rows), out)
    assert not out.any()
    assert (reader.gather("image", np.array([4, 0])) == IMAGES[[4, 0]]).all()
    file_of(tmp_path, "image", 2).write_bytes(whole)
    assert (reader.gather("image", np.array([11, 0])) == IMAGES[[11, 0]]).all()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_threads_gather_from_a_cold_reader_that_another_closes(tmp_path: Path, engine: str) -> None:
    images = pixels(60, shape=(3, 40, 50))
    make_dataset(tmp_path, images, shards=(2, 3, 1, 4) * 6)
    reader = Reader(tmp_path, engine=engine)
    faults: list[Any] = []
    done = threading.Event()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                rows = rng.integers(0, 60, 8)
                view = reader.flat("image", rows)
                if not (reader.gather("image", rows) == images[rows]).all():
                    faults.append(rows)
                if view is not None and not (view[0][int(view[1][0])] == images[rows[0]]).all():
                    faults.append(rows)
        except BaseException as error:
            faults.append(error)

    def close() -> None:
        while not done.wait(0.0005):  # without a pause it would hold the interpreter, and the others would gather from what is closed already
            reader.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    closer = threading.Thread(target=close)
    for thread in [*threads, closer]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    closer.join()
    assert faults == []
    reader.close()
    gc.collect()
    assert mapped_files(tmp_path) == []


# --- pages ---


@given(st.lists(st.integers(0, 1 << 20)), st.integers(1, 20_000))
def test_runs_are_the_pages_of_the_rows(starts: list[int], nbytes: int) -> None:
    pages = {page for start in starts for page in range(start // ALIGN, (start + nbytes - 1) // ALIGN + 1)}
    runs = page_runs(np.array(starts, np.int64), nbytes)
    assert [page for begin, end in runs for page in range(begin // ALIGN, end // ALIGN)] == sorted(pages)
    assert all(end < begin for (_, end), (begin, _) in pairwise(runs))
