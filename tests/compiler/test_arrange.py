"""Folders to a scan, without a disk; the rules themselves are tested over real trees in test_folder.py."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.sources.arrange import Folder, arrange
from mmcompile.compiler.sources.names import NO_EXTENSION, Choice
from mmcompile.errors import SourceError

ANY = Choice((), (), False, None)


def folder(key: bytes, *names: bytes, device: int | None = None) -> Folder:
    """A folder whose files have their position as size and inode."""
    stat = np.array([(i, 0, 0, i) for i in range(len(names))], STAT_DTYPE)
    return Folder.of(key, list(names), stat, None if device is None else np.full(len(names), device))


def test_items_stand_by_class_by_folder_by_name_and_keep_their_stat() -> None:
    given = [folder(b"b", b"2", b"1"), folder(b"a/x", b"1"), folder(b"a b", b"1"), folder(b"a", "\uffff".encode(), b"\xff"), folder(b"")]
    scan = arrange({"": "raw"}, iter(given), ANY)
    assert scan.keys == [b"a/\xff", "a/\uffff".encode(), b"a/x/1", b"a b/1", b"b/1", b"b/2"]
    assert scan.classes == ("a", "a b", "b")
    assert scan.labels is not None
    assert scan.labels.dtype == np.int64
    assert scan.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert scan.stat["size"].tolist() == [1, 0, 0, 0, 1, 0]
    assert scan.counts == {"folders": 4}


def test_a_class_is_there_as_soon_as_a_folder_below_it_is() -> None:
    scan = arrange({"": "raw"}, [folder(b"c/deep", b"1"), folder(b"b/deep"), folder(b"a", b"1")], ANY)
    assert (scan.classes, scan.labels.tolist() if scan.labels is not None else None) == (("a", "b", "c"), [0, 2])
    assert scan.warnings == ("1 of 3 class folders hold no image (they keep their numbers): b",)


def test_a_flat_folder_has_no_labels_and_its_empty_folders_are_no_classes() -> None:
    scan = arrange({"": "raw"}, [folder(b"", b"2", b"1"), folder(b"a")], ANY)
    assert (scan.keys, scan.labels, scan.classes, scan.warnings) == ([b"1", b"2"], None, None, ())


def test_files_reached_twice_are_counted_where_devices_are_known() -> None:
    one, two, three = folder(b"a", b"1", b"2", device=1), folder(b"b", b"1", b"2", b"3", device=1), folder(b"c", b"1", device=2)
    assert arrange({"": "raw"}, [one, two, three], ANY).counts["files reached again"] == 2
    assert "files reached again" not in arrange({"": "raw"}, [folder(b"a", b"1", device=-1), folder(b"b", b"1", device=-1)], ANY).counts
    assert "files reached again" not in arrange({"": "raw"}, [folder(b"a", b"1"), folder(b"b", b"1")], ANY).counts


def test_what_was_left_out_is_added_up() -> None:
    a, b = folder(b"a", b"1"), folder(b"b")
    a.left_out, a.counts = Counter(hidden=1, excluded=2), Counter({"links to files": 1})
    b.left_out, b.counts = Counter(hidden=3), Counter({"links to files": 2})
    scan = arrange({"": "raw"}, [a, b, folder(b"", b"stray")], ANY)
    assert scan.left_out == {"directly in RAW beside class folders": 1, "excluded": 2, "hidden": 4}
    assert scan.counts == {"folders": 2, "links to files": 3}


def test_nothing_and_doubt_are_refused_by_the_name_of_the_root() -> None:
    with pytest.raises(SourceError, match="no images in s3://bucket/raw: the folder is empty"):
        arrange({"": "s3://bucket/raw"}, [], ANY)
    with pytest.raises(SourceError, match="s3://bucket/raw holds splits"):
        arrange({"": "s3://bucket/raw"}, [folder(b"train/a", b"1"), folder(b"val/a", b"1"), folder(b"x", b"1")], ANY)


def test_a_choice_says_which_names_count_and_why_others_do_not() -> None:
    choice = Choice(("a/*", "nothing"), ("a/2.png", "a/b"), False, None)
    assert [choice.is_hidden(name) for name in (b".x", b"__MACOSX", b"x.")] == [True, True, False]
    assert (choice.excludes_folder(b"a/b"), choice.excludes_folder(b"a")) == (True, False)
    cases = {b"1.PNG": "", b"2.png": "excluded", b"3.txt": "extension .txt", b"4": NO_EXTENSION, b"5.": NO_EXTENSION}
    assert {name: choice.why_not(name, "a") for name in cases} == cases
    assert (choice.why_not(b"1.png", "b"), choice.why_not(b"1", "b")) == ("not included", "not included")
    assert choice.warnings() == ["--include nothing matches nothing"]
    assert Choice((), (), True, None).is_hidden(b".x") is False
    assert Choice((), (), False, frozenset({".txt"})).why_not(b"3.txt", "a") == ""


@pytest.mark.parametrize("seed", range(20))
def test_files_reached_twice_are_pairs_of_device_and_inode(seed: int) -> None:
    rng = np.random.default_rng(seed)
    folders, pairs = [], []
    for i in range(rng.integers(1, 6)):
        n = int(rng.integers(0, 5))
        stat = np.zeros(n, STAT_DTYPE)
        stat["inode"] = rng.integers(-2, 4, n)
        devices: np.ndarray | int | None = rng.integers(-1, 2, n)
        if kind := rng.integers(0, 3):
            devices = int(rng.integers(-1, 2)) if kind == 1 else None
        known = [-1] * n if devices is None else np.broadcast_to(devices, n).tolist()
        pairs += [pair for pair in zip(known, stat["inode"].tolist(), strict=True) if pair[0] != -1]
        folders.append(Folder.of(b"f%d" % i, [b"%d" % j for j in range(n)], stat, devices))
    folders.append(folder(b"z", b"1"))
    assert arrange({"": "raw"}, folders, ANY).counts.get("files reached again", 0) == len(pairs) - len(set(pairs))


@pytest.mark.parametrize("names", [[b"b", b"", b"a"], [b"x\0", b"x", b"\0x"], ["é".encode(), b"\xe9", b"z"], [b"%d" % i for i in range(40_000)]])
def test_a_folder_sorts_its_items_as_text(names: list[bytes]) -> None:
    wanted = sorted(names, key=lambda name: name.decode("utf-8", "surrogateescape"))
    for key, prefix in ((b"", b""), (b"c", b"c/")):
        made = folder(key, *names)
        assert made.keys == [prefix + name for name in wanted]
        assert [names[i] for i in made.stat["inode"].tolist()] == wanted
