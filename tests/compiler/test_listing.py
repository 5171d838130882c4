"""A scan saved and loaded again, and files that are no saved scan."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mmcompile.compiler.listing import load_listing, save_listing
from mmcompile.compiler.sources import LABEL, STAT_DTYPE, Scan, labelled
from mmcompile.compiler.sources.keys import Keys
from mmcompile.format.index import Field, Names, Split, row_dtype

STAT = np.array([(10, 1, 2, 3), (-1, -1, -1, -1), (2**40, -5, 2**62, -(2**63))], STAT_DTYPE)
LABELLED = Scan(
    Keys.of([b"a/1.png", b"a/\xff.png", b"c/\n.png"]),
    *labelled(np.array([0, 0, 2]), 3),
    STAT,
    ("a", "b\udcff", "c"),
    {"hidden": 3},
    ("2 of 3 class folders hold no image",),
    {"folders": 4},
)
FLAT = Scan(Keys.of([b"", b"x"]), *labelled(None, 2), STAT[:2])
EMPTY = Scan(Keys.of([]), *labelled(None, 0), STAT[:0])
FIELDS = (
    LABEL,
    Field("box", "float32", (2,), "value", columns=Names(("left", "t\udcffp"))),
    Field("kind", "int16", (), "value", categories=Names(tuple(f"kind {i}" for i in range(300)))),
    Field("taken", "int64", (), "value", unit="ms"),
)
RECORDS = np.array([(1, [0.5, -1], 299, 7), (0, [np.nan, 2], -1, -(2**62))], row_dtype(FIELDS))
PLACED = Keys(np.frombuffer(b"ab", np.uint8), np.array([1, 2]), places=np.array([(0, 2**40, -1), (1, 2, 3)]))
WIDE = Scan(PLACED, FIELDS, RECORDS, STAT[:2], ("no", "yes"), splits=(Split("train", 0, 1), Split("val", 1, 2)))


@pytest.mark.parametrize("scan", [LABELLED, FLAT, EMPTY, WIDE])
def test_what_was_saved_is_loaded(tmp_path: Path, scan: Scan) -> None:
    save_listing(tmp_path / "listing", scan, 123, {"source": {"kind": "folder"}})
    assert os.listdir(tmp_path) == ["listing"]
    loaded = load_listing(tmp_path / "listing")
    assert loaded is not None
    found, at_ns, head = loaded
    assert (at_ns, head) == (123, {"source": {"kind": "folder"}})
    assert found.keys == scan.keys
    assert found.stat.dtype == STAT_DTYPE
    assert np.array_equal(found.stat, scan.stat)
    assert (found.classes, found.left_out, found.warnings, found.counts) == (scan.classes, scan.left_out, scan.warnings, scan.counts)
    assert (found.keys.places is None) == (scan.keys.places is None)
    assert found.keys.places is None or np.array_equal(found.keys.places, scan.keys.places)
    assert (found.fields, found.splits) == (scan.fields, scan.splits)
    assert found.values.dtype == scan.values.dtype
    assert found.values.tobytes() == scan.values.tobytes()


def test_any_damage_makes_the_listing_count_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "listing"
    assert load_listing(path) is None
    save_listing(path, LABELLED, 123, {})
    data = path.read_bytes()
    damaged = [data[:n] for n in range(len(data))] + [data + b"x", b"[" * 100_000]
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        assert load_listing(path) is None


def test_a_folder_of_that_name_is_no_listing(tmp_path: Path) -> None:
    assert load_listing(tmp_path) is None


def test_a_save_that_fails_leaves_the_old_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "listing"
    save_listing(path, LABELLED, 123, {})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save_listing(path, FLAT, 124, {})
    assert os.listdir(tmp_path) == ["listing"]
    loaded = load_listing(path)
    assert loaded is not None
    assert loaded[1] == 123
