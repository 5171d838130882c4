from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmcompile.compiler.reuse import OldShard, RowTable, write_table
from mmcompile.errors import FormatError
from mmcompile.format.index import load_index
from mmcompile.format.npy import ALIGN
from mmcompile.format.reader import Reader
from mmcompile.format.samples import pair_hash
from tests.compiler.builds import inline, make_raw, run


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


def table(old: list[OldShard], folder: Path) -> RowTable:
    path = write_table(old, folder)
    assert path is not None
    return RowTable(path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_every_row_is_found_by_the_hash_of_its_source_and_no_other(old: list[OldShard], tmp_path: Path) -> None:
    found, image = table(old, tmp_path), old[0].fields[0]
    reader = Reader(tmp_path / "out")
    rows = reader.gather("image", np.arange(len(reader)))
    records = np.concatenate([reader.samples(s) for s in range(len(reader.table))])
    out = np.empty((1, *image.shape), image.stored)
    for row, record in zip(rows, records, strict=True):
        assert found.take(pair_hash(record["source_hash"]), image, out) == record
        assert np.array_equal(out[0], row)
    assert found.take("0" * 32, image, out) is None
    assert found.take("f" * 32, image, out) is None


def test_a_source_format_whose_rows_are_no_longer_right_has_none(old: list[OldShard], tmp_path: Path) -> None:
    png = [OldShard(s.folder, s.fields, s.files, s.rows, frozenset({"PNG"})) for s in old]
    found, image = table(png, tmp_path), old[0].fields[0]
    out = np.empty((1, *image.shape), image.stored)
    for shard in old:
        for record in shard.samples():
            taken = found.take(pair_hash(record["source_hash"]), image, out)
            assert (taken is not None) == (record["format"] == b"PNG")


@pytest.mark.parametrize("kind", ["image", "label"])
def test_a_damaged_row_is_not_handed_out_and_its_neighbours_are(old: list[OldShard], tmp_path: Path, kind: str) -> None:
    shard, image = old[0], old[0].fields[0]
    assert shard.rows >= 2
    hashes = [pair_hash(h) for h in shard.samples()["source_hash"]]
    flip(shard.path(kind), ALIGN + 1)
    found = table(old, tmp_path)
    out = np.empty((1, *image.shape), image.stored)
    assert found.take(hashes[0], image, out) is None
    assert found.take(hashes[1], image, out) is not None


def test_of_two_rows_of_one_source_the_sound_one_is_handed_out(old: list[OldShard], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (tmp_path / "out" / "shards").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(old[0].path("image"), ALIGN)
    both = [*old, *(OldShard(str(copy), s.fields, s.files, s.rows, s.formats) for s in old)]
    image = old[0].fields[0]
    out = np.empty((1, *image.shape), image.stored)
    digest = pair_hash(old[0].samples()["source_hash"][0])
    assert table(both, tmp_path).take(digest, image, out) is not None


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
    sound = old[1].samples()
    with pytest.raises((FormatError, FileNotFoundError)):
        old[0].keys(old[0].samples())
    if kind == "samples":
        assert len(table(old, tmp_path)._table) == sum(s.rows for s in old[1:])
        assert len(sound) == old[1].rows


def test_without_rows_there_is_no_table(tmp_path: Path) -> None:
    assert write_table([], tmp_path) is None
