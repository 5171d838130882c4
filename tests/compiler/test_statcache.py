from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmcompile.compiler.plan import key_hashes
from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.compiler.statcache import StatCache, old_enough

SECOND = 1_000_000_000
NOW = 1_000 * SECOND
KEYS = key_hashes([b"c", b"a", b"b"])
STAT = np.array([(10, SECOND, SECOND, 1), (20, 2 * SECOND, SECOND, 2), (30, SECOND, 2 * SECOND, 3)], STAT_DTYPE)
HASHES = np.array([(1, 2), (3, 4), (5, 6)], np.uint64)
ALL = np.ones(3, bool)


def saved(path: Path, stat: np.ndarray = STAT, known: np.ndarray = ALL) -> StatCache:
    StatCache(path, "1:2").save(KEYS, stat, HASHES, known, NOW)
    return StatCache(path, "1:2")


def test_what_was_saved_is_known_again_in_any_order(tmp_path: Path) -> None:
    cache = saved(tmp_path / "cache")
    order = [2, 0, 1]
    hashes, known = cache.known(KEYS[order], STAT[order])
    assert known.all()
    assert np.array_equal(hashes, HASHES[order])


@pytest.mark.parametrize("column", STAT_DTYPE.names)
def test_a_file_whose_stat_differs_in_any_column_is_not_known(tmp_path: Path, column: str) -> None:
    cache, stat = saved(tmp_path / "cache"), STAT.copy()
    stat[column][1] += 1
    assert cache.known(KEYS, stat)[1].tolist() == [True, False, True]


def test_what_was_not_read_and_keys_never_seen_are_not_known(tmp_path: Path) -> None:
    cache = saved(tmp_path / "cache", known=np.array([True, False, True]))
    assert cache.known(KEYS, STAT)[1].tolist() == [True, False, True]
    assert cache.known(key_hashes([b"new"]), STAT[:1])[1].tolist() == [False]
    assert cache.known(key_hashes([]), STAT[:0])[1].tolist() == []


def test_a_file_that_was_young_when_scanned_is_not_trusted() -> None:
    stat = STAT.copy()
    stat["mtime_ns"][0] = NOW - 2 * SECOND + 1
    stat["ctime_ns"][1] = NOW - 1
    assert old_enough(stat, NOW).tolist() == [False, False, True]
    stat["mtime_ns"][0] = NOW - 2 * SECOND
    assert old_enough(stat, NOW).tolist() == [True, False, True]
    stat["mtime_ns"][2] = NOW + 100 * SECOND  # a clock that is ahead of ours
    assert not old_enough(stat, NOW)[2]


def test_a_young_file_is_not_saved_and_one_that_could_not_be_looked_at_is_none(tmp_path: Path) -> None:
    stat = STAT.copy()
    stat["mtime_ns"][0] = NOW - SECOND
    stat[1] = (-1, -1, -1, -1)
    assert saved(tmp_path / "cache", stat).known(KEYS, stat)[1].tolist() == [False, False, True]


def test_the_cache_of_another_raw_is_ignored(tmp_path: Path) -> None:
    saved(tmp_path / "cache")
    assert not StatCache(tmp_path / "cache", "1:3").known(KEYS, STAT)[1].any()


def test_any_damage_makes_the_cache_count_as_absent(tmp_path: Path) -> None:
    saved(tmp_path / "cache")
    data = (tmp_path / "cache").read_bytes()
    rng = np.random.default_rng(0)
    damaged = [data[:n] for n in range(0, len(data), 7)] + [data + b"x"]
    for at in rng.integers(0, len(data), 60).tolist():
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        damaged.append(bytes(flipped))
    for content in damaged:
        (tmp_path / "cache").write_bytes(content)
        assert not StatCache(tmp_path / "cache", "1:2").known(KEYS, STAT)[1].any()
