from __future__ import annotations

import gc
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.index import DTYPES
from mmcompile.format.npy import ALIGN, file_bytes, file_name, hash_bytes, hash_file, header, map_file, open_array, read_array, read_into, save_array

RECORD = np.dtype([("a", "<u8"), ("b", "<u8", (2,)), ("c", "S8")])
dtypes = st.sampled_from([*DTYPES.values(), RECORD])


@given(dtypes, st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
def test_numpy_reads_what_the_header_says(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    head = header(dtype, shape)
    data = np.random.default_rng(0).bytes(dtype.itemsize * int(np.prod(shape)))
    assert len(head) % ALIGN == 0
    assert head[:8] == b"\x93NUMPY\x01\x00"
    assert file_bytes(dtype, shape) == len(head) + len(data)
    array = np.load(io.BytesIO(head + data))
    assert (array.dtype, array.shape, array.tobytes()) == (dtype, shape, data)
    assert array.dtype.byteorder in "<|="


def test_a_header_is_as_numpy_writes_it_but_for_the_padding() -> None:
    for dtype in (*DTYPES.values(), RECORD):
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (7, 3)})
        assert header(dtype, (7, 3))[10:].rstrip() == file.getvalue()[10:].rstrip()


def test_a_header_longer_than_a_page_takes_more_pages() -> None:
    wide = np.dtype([(f"column_{i:050d}", "<u8", (2,)) for i in range(100)])
    assert len(header(wide, (1,))) == 2 * ALIGN


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(1,), (3, 2, 2), (0,), (2, 0)])
def test_arrays_round_trip_under_the_hash_of_the_file(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape)) % 2).reshape(shape).astype(DTYPES[name])
    digest = save_array(tmp_path, "image", array, tmp_path)
    path = tmp_path / file_name("image", digest)
    assert os.listdir(tmp_path) == [path.name]
    assert hash_bytes(path.read_bytes()) == digest == xxhash.xxh3_128(path.read_bytes()).hexdigest()
    back = read_array(path, array.dtype, shape)
    assert (back == array).all()
    assert back.flags.owndata
    assert (np.load(path) == array).all()
    assert np.load(path).dtype == array.dtype


def test_arrays_that_are_not_contiguous_are_saved_in_c_order(tmp_path: Path) -> None:
    array = np.arange(24, dtype="<i4").reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    digest = save_array(tmp_path, "x", array, tmp_path)
    assert (np.load(tmp_path / f"x-{digest}.npy") == array).all()


@given(st.binary(max_size=5000))
def test_a_file_hashes_as_its_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "hashed"
    path.write_bytes(data)
    pieces: list[int] = []
    with open(path, "rb") as file:
        assert hash_file(file.fileno(), pieces.append) == hash_bytes(data)
    assert sum(pieces) == len(data)


GOOD = np.arange(12, dtype="<i4").reshape(3, 4)


def other_header(**changes: Any) -> bytes:
    """A well-formed header that says something else, over the same number of bytes."""
    fields: dict[str, Any] = {"descr": "<i4", "fortran_order": False, "shape": (3, 4)} | changes
    text = repr(fields).encode()
    return b"\x93NUMPY\x01\x00" + (ALIGN - 10).to_bytes(2, "little") + text.ljust(ALIGN - 11) + b"\n"


@pytest.mark.parametrize(
    "head",
    [
        other_header(descr=">i4"),
        other_header(descr="<f4"),
        other_header(descr="|O"),
        other_header(descr="|V4"),
        other_header(fortran_order=True),
        other_header(shape=(4, 3)),
        other_header(shape=(-3, -4)),
        other_header(shape=(1 << 62, 4)),
        other_header(shape=()),
        b"\x93NUMPY\x02\x00" + header(GOOD.dtype, GOOD.shape)[8:],
        b"\x93NUMPY\x01\x00\xff\xff" + header(GOOD.dtype, GOOD.shape)[10:],
        pickle.dumps(list(range(5))).ljust(ALIGN),
        bytes(ALIGN),
        header(GOOD.dtype, GOOD.shape)[:-1] + b"\0",
    ],
)
def test_any_other_header_is_refused_unread(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(head + GOOD.tobytes())
    with pytest.raises(CorruptShardError, match="its header is"):
        open_array(path, GOOD.dtype, GOOD.shape)


@pytest.mark.parametrize("change", [-49, -48, -1, 1, 4096, 1 << 40])
def test_any_other_size_is_refused(tmp_path: Path, change: int) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(header(GOOD.dtype, GOOD.shape) + GOOD.tobytes())
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CorruptShardError, match=rf"bytes, expected {ALIGN + 48:,} .*; run `mmcompile verify /[^`{{}}]*`, which says how to mend it$"):
        open_array(path, GOOD.dtype, GOOD.shape)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(header(GOOD.dtype, GOOD.shape) + GOOD.tobytes())
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("good")
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for name, kind, fault in (
        ("folder", CorruptShardError, "folder: expected a file, found a folder: move it away$"),
        ("fifo", CorruptShardError, "expected a file, found a pipe, socket or device: move it away$"),
        ("link", FormatError, "a link"),
        ("x" * 300, CorruptShardError, "cannot be opened"),
    ):
        with pytest.raises(kind, match=fault):
            open_array(tmp_path / name, GOOD.dtype, GOOD.shape)
    with pytest.raises(CorruptShardError, match="expected a file, found a pipe, socket or device"):
        open_array(Path("/dev/zero"), GOOD.dtype, GOOD.shape)
    for absent in ("absent", "good/below"):
        with pytest.raises(FileNotFoundError):
            open_array(tmp_path / absent, GOOD.dtype, GOOD.shape)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_ends_early_is_no_other_data(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    out = np.zeros(8, np.uint8)
    with open(path, "rb") as file, pytest.raises(CorruptShardError, match="ends at byte 5"):
        read_into(file.fileno(), out, 0, path)


@pytest.fixture
def mapped_file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_map_holds_no_descriptor_and_goes_with_its_last_view(mapped_file: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(mapped_file, os.O_RDONLY)
    array = map_file(fd, 256 * 64, writable=False)
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    assert maps_of(mapped_file) == 1
    view = array[100:200].view("<u2").reshape(2, 25)
    del array
    gc.collect()
    assert maps_of(mapped_file) == 1
    assert view.tobytes() == mapped_file.read_bytes()[100:200]
    del view
    gc.collect()
    assert maps_of(mapped_file) == 0


def test_a_read_only_map_refuses_writes_and_a_writable_one_keeps_them_here(mapped_file: Path) -> None:
    before = mapped_file.read_bytes()
    with open(mapped_file, "rb") as file:
        frozen, private = map_file(file.fileno(), 1000, writable=False), map_file(file.fileno(), 1000, writable=True)
    with pytest.raises(ValueError, match="read-only"):
        frozen[0] = 1
    private[:] = 9
    assert (private == 9).all()
    assert frozen.tobytes() == before[:1000]
    assert mapped_file.read_bytes() == before


def test_an_empty_map_and_one_that_cannot_be(mapped_file: Path, tmp_path: Path) -> None:
    with open(mapped_file, "rb") as file:
        assert map_file(file.fileno(), 0, writable=True).size == 0
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="cannot map"):
        map_file(fd, 100, writable=False)
    os.close(fd)


def test_a_map_survives_a_fork(mapped_file: Path) -> None:
    with open(mapped_file, "rb") as file:
        array = map_file(file.fileno(), 256 * 64, writable=True)
    pid = os.fork()
    if not pid:
        array[0] = 77
        os._exit(0 if array[0] == 77 and array[256 * 64 - 1] == 255 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert array[0] == 0


def test_a_map_larger_than_memory_is_no_commitment(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    size = 1 << 40
    os.truncate(path, size)
    with open(path, "rb") as file:
        array = map_file(file.fileno(), size, writable=True)
    array[size - 1] = 3
    assert int(array[size - 1]) == 3
    assert int(array[size // 2]) == 0
