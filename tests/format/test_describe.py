from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mmcompile.errors import CorruptShardError, FormatError
from mmcompile.format.describe import describe
from mmcompile.format.index import load_index
from mmcompile.format.reader import Reader
from mmcompile.format.samples import pair_hash
from mmcompile.format.sampletable import SAMPLE_COLUMNS, samples_table
from tests.format.builders import GOLDEN, age, change_index, file_of, pixels, put_array, small
from tests.support import make_dataset


def test_counts_are_those_of_the_labels_for_each_split(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 4, 50)
    make_dataset(tmp_path / "out", pixels(50), labels, shards=(7, 23, 20), splits={"train": 30, "empty": 0, "test": 20})
    info = describe(tmp_path / "out")
    assert [c["count"] for c in info["classes"]] == np.bincount(labels, minlength=4).tolist()
    assert info["splits"][0]["classes"] == np.bincount(labels[:30], minlength=4).tolist()
    assert info["splits"][1]["classes"] == [0] * 4
    assert info["splits"][2]["classes"] == np.bincount(labels[30:], minlength=4).tolist()
    assert (info["samples"], info["shards"], info["unknown_labels"]) == (50, 3, 0)
    json.dumps(info)


def test_labels_are_counted_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.format.describe.ROWS_AT_ONCE", 7)
    labels = np.arange(50) % 3
    make_dataset(tmp_path / "out", pixels(50), labels, shards=(20, 30), splits={"a": 15, "b": 35})
    info = describe(tmp_path / "out")
    assert [s["classes"] for s in info["splits"]] == [np.bincount(labels[:15]).tolist(), np.bincount(labels[15:]).tolist()]


def test_labels_that_are_no_class_are_counted_apart(root: Path) -> None:
    put_array(root, "label", 0, np.array([-1, 2**62, 0, 1, -(2**63)], "<i8"))
    info = describe(root)
    assert info["unknown_labels"] == 3
    assert [r["class"] for r in samples_table(root)][:5] == [None, None, "class 0", "class 1", None]


def test_sizes_are_those_of_the_files(root: Path) -> None:
    dataset = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
    (root / ".build").mkdir()
    (root / ".build" / "x").write_bytes(bytes(1000))
    assert describe(root)["bytes"] == {"dataset": dataset, "folder": dataset + 1000}


def test_generations_stand_newest_first_and_an_older_one_can_be_asked_for(root: Path) -> None:
    first = load_index(root)[1]
    second = small(root, seed=1)
    age(root, first, 50)
    info = describe(root, first)
    assert info["generation"] == first
    assert [(g["name"], g["current"]) for g in info["generations"]] == [(second, True), (first, False)]


def test_a_dataset_without_labels_and_an_empty_one_are_described(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", pixels(3))
    info = describe(tmp_path / "a")
    assert (info["classes"], info["splits"][0]["classes"]) == (None, None)
    make_dataset(tmp_path / "b", pixels(0), [])
    info = describe(tmp_path / "b")
    assert (info["samples"], info["shards"], list(samples_table(tmp_path / "b"))) == (0, 0, [])


def test_the_table_has_every_row_as_the_reader_tells_it(root: Path) -> None:
    reader = Reader(root)
    rows = list(samples_table(root))
    keys = [k for i in range(3) for k in reader.keys(i)]
    records = np.concatenate([reader.samples(i) for i in range(3)])
    assert all(tuple(row) == SAMPLE_COLUMNS for row in rows)
    assert [os.fsencode(r["key"]) for r in rows] == keys
    assert [r["row"] for r in rows] == list(range(12))
    assert [r["label"] for r in rows] == reader.column("label").tolist()
    assert [r["row_hash"] for r in rows] == [f"{h:016x}" for h in records["row_hash"].tolist()]
    assert [r["source_hash"] for r in rows] == [pair_hash(p) for p in records["source_hash"]]


def test_the_table_comes_in_pieces(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(samples_table(root))
    monkeypatch.setattr("mmcompile.format.damage._CHUNK", 300)
    assert list(samples_table(root)) == whole


def test_flags_are_words_and_unknown_bits_are_not_lost(root: Path) -> None:
    samples = np.load(file_of(root, "samples", 0))
    samples["flags"][:3] = [0, 1 | 4, 32 | 1 << 31]
    put_array(root, "samples", 0, samples)
    assert [r["flags"] for r in samples_table(root)][:3] == ["", "broken-exif more-frames", "pillow-warning bit-31"]


def test_keys_that_are_not_utf8_survive_a_csv_file(tmp_path: Path) -> None:
    keys = [b'a\xff,".png', "ü\n.png".encode(), b"%FF.png"]
    make_dataset(tmp_path / "out", pixels(3), keys=keys)
    path = tmp_path / "samples.csv"
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, SAMPLE_COLUMNS)
        writer.writeheader()
        writer.writerows(samples_table(tmp_path / "out"))
    assert b"a\xff," in path.read_bytes()
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        assert [os.fsencode(row["key"]) for row in csv.DictReader(file)] == keys


def test_rejects_are_counted_by_reason() -> None:
    info = describe(GOLDEN / "labelled")
    assert info["rejects"]["count"] == 2
    assert info["rejects"]["reasons"] == {"too-large": 1, "truncated": 1}
    assert (GOLDEN / "labelled" / info["rejects"]["file"]).exists()


def test_damage_is_an_error_that_names_the_file(root: Path) -> None:
    path = file_of(root, "label", 1)
    path.unlink()
    with pytest.raises(CorruptShardError, match=path.name):
        describe(root)
    with pytest.raises(CorruptShardError, match=path.name):
        list(samples_table(root))


def test_wrong_offsets_of_keys_are_an_error(root: Path) -> None:
    samples = np.load(file_of(root, "samples", 0))
    samples["key_stop"][1] = 1 << 60
    put_array(root, "samples", 0, samples)
    with pytest.raises(FormatError, match="do not rise"):
        list(samples_table(root))


def test_missing_rejects_are_an_error(root: Path) -> None:
    change_index(root, lambda v: v["rejects"].update(count=1, file="0" * 32))
    with pytest.raises(CorruptShardError, match=r"rejects-0+\.jsonl"):
        describe(root)
