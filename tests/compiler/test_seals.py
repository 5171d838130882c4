from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mmcompile.compiler.seals import Seal, read_seals, write_seal
from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.format.canonical import canonical
from mmcompile.format.index import Field, row_dtype
from mmcompile.format.npy import hash_bytes

A, B = "a" * 32, "b" * 32
FIELDS = (Field("image", "uint8", (3, 1, 2), "image"), Field("label", "int64", (), "class"), Field("box", "float32", (4,), "value"))
SEAL = Seal(
    task=A,
    pixel="p",
    store="s",
    made={"versions": {"pillow": "x"}},
    fields=FIELDS,
    values=np.array([(0, [1, 2, 3, 4]), (1, [0, 0.5, -1, np.inf])], row_dtype(FIELDS[1:])),
    stat=np.array([(1, 2, 3, 4), (-1, -1, -1, -1)], STAT_DTYPE),
    hashes=np.array([(1, 2**64 - 1), (3, 4)], np.uint64),
    rejects={1: {"key": {"bytes": "%FF"}, "source_hash": B, "stage": "load"}},
    files={"image": A, "label": B, "samples": A, "keys": B},
    rows=1,
    sums={"image": [{"depth": 8, "pixels": 4, "sum": [2**60, 0.1], "sum_squares": [None, 1]}]},
    flags={"more-frames": 1},
)


def test_a_seal_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_seal(tmp_path / "seals", SEAL)
    (found,) = read_seals(tmp_path / "seals")
    for field in dataclasses.fields(Seal):
        mine, theirs = getattr(SEAL, field.name), getattr(found, field.name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, field.name
    assert sorted(found.names()) == sorted([f"image-{A}.npy", f"label-{B}.npy", f"samples-{A}.npy", f"keys-{B}.npy"])


def test_without_a_folder_there_are_no_seals(tmp_path: Path) -> None:
    assert list(read_seals(tmp_path / "none")) == []


def test_a_seal_is_not_written_where_the_build_folder_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_seal(tmp_path / "gone" / "seals", SEAL)


def test_any_damage_makes_a_seal_count_as_absent(tmp_path: Path) -> None:
    write_seal(tmp_path, SEAL)
    path = tmp_path / f"{A}.json"
    data = path.read_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        for damaged in (bytes(flipped), data[:at]):
            path.write_bytes(damaged)
            assert list(read_seals(tmp_path)) == [], damaged


def test_a_seal_that_was_written_anew_by_others_counts_as_absent(tmp_path: Path) -> None:
    write_seal(tmp_path, SEAL)
    path = tmp_path / f"{A}.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=1))
    assert list(read_seals(tmp_path)) == []


def test_an_outline_holds_what_publishing_needs() -> None:
    outline = SEAL.outline()
    assert (outline.task, outline.files, outline.rows, outline.sums, outline.flags) == (A, SEAL.files, 1, SEAL.sums, SEAL.flags)
    assert (outline.rejects, outline.names()) == (SEAL.rejects, SEAL.names())
    assert (len(outline.stat), len(outline.hashes), len(outline.values)) == (0, 0, 0)
    assert outline.stat.base is None
    assert outline.hashes.base is None


def test_a_seal_under_the_name_of_another_counts_as_absent(tmp_path: Path) -> None:
    write_seal(tmp_path, SEAL)
    (tmp_path / f"{A}.json").rename(tmp_path / f"{B}.json")
    assert list(read_seals(tmp_path)) == []


@pytest.mark.parametrize("name", [f"../../x-{A}.npy", f"/etc/x-{A}.npy", "image-short.npy", f"image-{A}.json", f"-{A}.npy", f"image-{A}.npy/.."])
def test_a_seal_never_names_a_file_elsewhere(tmp_path: Path, name: str) -> None:
    write_seal(tmp_path, SEAL)
    path = tmp_path / f"{A}.json"
    document = json.loads(path.read_bytes())["seal"]
    path.write_bytes(canonical({"seal": document, "hash": hash_bytes(canonical(document))}))
    assert [seal.task for seal in read_seals(tmp_path)] == [A]
    document["files"] = [name]
    path.write_bytes(canonical({"seal": document, "hash": hash_bytes(canonical(document))}))
    assert list(read_seals(tmp_path)) == []
