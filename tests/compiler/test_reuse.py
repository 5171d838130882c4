from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler.copying import Copier
from mmcompile.compiler.reuse import OldShard, RowTable, list_rows, write_table
from mmcompile.compiler.sources import labelled
from mmcompile.errors import FormatError
from mmcompile.format.index import load_index
from mmcompile.format.npy import ALIGN
from mmcompile.format.reader import Reader
from mmcompile.format.samples import hash_pair, pair_hash
from tests.compiler.builds import SMALL, inline, make_raw, run


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[OldShard]:
    inline(monkeypatch)
    run(make_raw(tmp_path / "raw"), tmp_path / "out")
    reader = Reader(tmp_path / "out")
    index, _ = load_index(tmp_path / "out")
    names = [n for n in reader.table.dtype.names or () if n != "rows"]
    return [
        OldShard(str(tmp_path / "out" / "shards"), index.fields, {n: pair_hash(r[n]) for n in names}, int(r["rows"]), frozenset({"PNG", "JPEG"}))
        for r in reader.table
    ]


def copier(old: list[OldShard], folder: Path) -> Copier:
    path = write_table(old, folder)
    assert path is not None
    return Copier(RowTable(path), SMALL.resolved(), old[0].fields)


def of(labels: Any) -> Any:
    """These class numbers as values."""
    return labelled(labels, len(labels))[1]


def take(copies: Copier, pair: Any, label: int) -> tuple[np.ndarray, np.void] | None:
    """The first sound row of a source, and its record."""
    for shard, row in copies.places(pair):
        rows, _, records, right = copies.copy(shard, row, of(np.array([label])), [b"any"])
        if right[0]:
            return rows.arrays[0][0].copy(), records[0]
    return None


def pairs(shard: OldShard) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in shard.samples()["source_hash"]]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_every_row_is_found_by_the_hash_of_its_source_and_no_other(old: list[OldShard], tmp_path: Path) -> None:
    copies = copier(old, tmp_path)
    reader = Reader(tmp_path / "out")
    rows, labels = reader.gather("image", np.arange(len(reader))), reader.column("label").tolist()
    records = np.concatenate([reader.samples(s) for s in range(len(reader.table))])
    for row, record, label in zip(rows, records, labels, strict=True):
        found = take(copies, record["source_hash"].tolist(), label)
        assert found is not None
        assert found[1] == record
        assert np.array_equal(found[0], row)
    assert copies.places(hash_pair("0" * 32)) == copies.places(hash_pair("f" * 32)) == []


def test_another_label_changes_the_hash_of_a_row_and_nothing_else(old: list[OldShard], tmp_path: Path) -> None:
    copies, pair = copier(old, tmp_path), pairs(old[0])[0]
    one, two = take(copies, pair, 0), take(copies, pair, 7)
    assert one is not None
    assert two is not None
    assert one[1]["row_hash"] != two[1]["row_hash"]
    assert [n for n in one[1].dtype.names or () if not np.array_equal(one[1][n], two[1][n])] == ["row_hash"]
    assert np.array_equal(one[0], two[0])


def test_rows_that_follow_each_other_are_one_run_of_bounded_length(old: list[OldShard], tmp_path: Path) -> None:
    copies = copier(old, tmp_path)
    hashes = np.concatenate([s.samples()["source_hash"] for s in old])
    runs = list(copies.runs(hashes, np.arange(len(hashes))))
    assert [(shard, row, len(items)) for items, shard, row in runs] == [(i, 0, s.rows) for i, s in enumerate(old)]
    assert np.concatenate([items for items, *_ in runs]).tolist() == list(range(len(hashes)))
    copies.most = 2
    assert max(len(items) for items, *_ in copies.runs(hashes, np.arange(len(hashes)))) == 2
    backwards = list(copies.runs(hashes[::-1].copy(), np.arange(len(hashes))))
    assert [len(items) for items, *_ in backwards] == [1] * len(hashes)
    assert list(copies.runs(np.zeros((3, 2), np.uint64), np.arange(3))) == []


def test_a_kind_whose_rows_are_no_longer_right_has_none(old: list[OldShard], tmp_path: Path) -> None:
    copies = copier([OldShard(s.folder, s.fields, s.files, s.rows, frozenset({"PNG", "JPEG deep"})) for s in old], tmp_path)
    for shard in old:
        for record in shard.samples():
            assert bool(copies.places(record["source_hash"].tolist())) == (record["format"] == b"PNG")


@pytest.mark.parametrize("kind", ["image", "label"])
def test_a_damaged_row_is_not_handed_out_and_its_neighbours_are(old: list[OldShard], tmp_path: Path, kind: str) -> None:
    shard = old[0]
    assert shard.rows >= 2
    first, second = pairs(shard)[:2]
    flip(shard.path(kind), ALIGN + 1)
    copies = copier(old, tmp_path)
    assert take(copies, first, 0) is None
    assert take(copies, second, 0) is not None
    assert copies.copy(0, 0, of(np.zeros(2, np.int64)), [b"any"] * 2)[3].tolist() == [False, True]


@pytest.mark.parametrize(("kind", "how"), [("image", "cut"), ("label", "cut"), ("label", "gone"), ("samples", "cut"), ("samples", "gone")])
def test_a_file_that_was_cut_while_it_is_in_use_is_no_row_and_no_signal(old: list[OldShard], tmp_path: Path, kind: str, how: str) -> None:
    copies, path = copier(old, tmp_path), old[0].path(kind)
    labels = np.zeros(old[0].rows, np.int64)
    if kind == "image":  # it is open by then
        assert copies.copy(0, 0, of(labels[:1]), [b"any"] * 2)[3].all()
        os.truncate(path, ALIGN + old[0].fields[0].row_bytes)
        assert copies.copy(0, 0, of(labels[:1]), [b"any"] * 2)[3].all()
        assert not copies.copy(0, 1, of(labels[1:]), [b"any"] * 2)[3].any()
    else:
        os.truncate(path, 100) if how == "cut" else path.unlink()
        assert not copies.copy(0, 0, of(labels), [b"any"] * 2)[3].any()
    assert copies.copy(1, 0, of(np.zeros(1, np.int64)), [b"any"] * 2)[3].all()


def test_of_two_rows_of_one_source_the_sound_one_is_handed_out(old: list[OldShard], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (tmp_path / "out" / "shards").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(old[0].path("image"), ALIGN)
    both = [*old, *(OldShard(str(copy), s.fields, s.files, s.rows, s.formats) for s in old)]
    assert take(copier(both, tmp_path), pairs(old[0])[0], 0) is not None


@pytest.mark.parametrize("kind", ["samples", "keys"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_provenance_is_no_provenance(old: list[OldShard], tmp_path: Path, kind: str, damage: str) -> None:
    path = old[0].path(kind)
    if damage == "flip":
        flip(path, path.stat().st_size - 1)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises((FormatError, FileNotFoundError)):
        old[0].keys(old[0].samples())
    if kind == "samples":
        assert len(list_rows(old).high) == sum(s.rows for s in old[1:])


def test_a_list_of_rows_finds_the_first_of_each_source_also_where_halves_of_hashes_are_equal(old: list[OldShard]) -> None:
    rows = list_rows([*old, *old])
    hashes = np.concatenate([s.samples()["source_hash"] for s in old])
    found = rows.find(hashes)
    assert (rows.place["shard"][found] < len(old)).all()
    assert np.array_equal(np.stack([rows.high[found], rows.low[found]], 1), hashes)
    other = hashes.copy()
    other[:, 1] += 1
    assert (rows.find(other) == -1).all()
    assert (rows.find(np.array([(0, 0), (2**64 - 1, 2**64 - 1)], np.uint64)) == -1).all()
    crowded = list_rows([])
    assert (crowded.find(hashes) == -1).all()


def test_without_rows_there_is_no_table(tmp_path: Path) -> None:
    assert write_table([], tmp_path) is None
