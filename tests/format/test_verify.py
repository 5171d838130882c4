from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mmcompile.errors import NotADatasetError, VersionError
from mmcompile.format import findings
from mmcompile.format.index import load_index
from mmcompile.format.npy import ALIGN
from mmcompile.format.verify import Problem, verify
from tests.format.builders import change_index, file_of, pixels, put_array, small
from tests.support import make_dataset


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def one(root: Path) -> Problem:
    report = verify(root)
    assert not report.ok
    assert len(report.problems) == 1, report.problems
    json.dumps(report.to_json())
    return report.problems[0]


def test_a_sound_dataset_is_ok_and_each_file_is_read_once(root: Path) -> None:
    sizes = [p.stat().st_size for p in root.rglob("*") if p.is_file()]
    seen: list[tuple[int, int]] = []
    report = verify(root, workers=3, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.files, report.bytes, report.samples) == (len(sizes), sum(sizes), 12)
    assert (report.extra, report.misnamed, report.problems) == ((), (), ())
    assert seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in (root / "shards").iterdir())
    assert report.generations == (report.generation,)
    json.dumps(report.to_json())


@pytest.mark.parametrize("workers", [1, 8])
def test_a_flipped_byte_is_named_by_shard_row_and_source(root: Path, workers: int) -> None:
    path = file_of(root, "image", 1)
    flip(path, ALIGN + 2 * 60 + 17)
    (problem,) = verify(root, workers=workers).problems
    assert (problem.kind, problem.what, problem.shard) == ("changed", "image", 1)
    assert (problem.rows, problem.bad_rows, problem.start, problem.stop) == ((7,), 1, 5, 9)
    assert problem.sources == ("class 1/000007.png",)
    assert problem.path == f"shards/{path.name}"
    assert "row 7 (class 1/000007.png)" in problem.message
    assert problem.generations == (load_index(root)[1],)


def test_every_single_flipped_byte_of_every_file_is_found(root: Path) -> None:
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        for at in {0, 9, path.stat().st_size // 2, path.stat().st_size - 1}:
            flip(path, at)
            report = verify(root, workers=1)
            assert {str(p.path) for p in report.problems} == {str(path.relative_to(root))}, (path, at, report.problems)
            assert {p.kind for p in report.problems} == {"changed"}
            flip(path, at)
    assert verify(root).ok


def test_damage_before_the_rows_names_no_row(root: Path) -> None:
    flip(file_of(root, "image"), ALIGN - 5)
    problem = one(root)
    assert (problem.kind, problem.bad_rows, problem.rows, problem.shard) == ("changed", 0, (), 0)


def test_many_bad_rows_are_counted_and_the_first_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.format.verify.ROWS_LISTED", 4)
    make_dataset(tmp_path / "out", pixels(20), shards=(20,))
    path = file_of(tmp_path / "out", "image")
    for row in range(3, 20, 2):
        flip(path, ALIGN + row * 60)
    problem = one(tmp_path / "out")
    assert (problem.bad_rows, problem.rows, len(problem.sources)) == (9, (3, 5, 7, 9), 4)
    assert findings.ROWS_LISTED == 1000


def test_bad_rows_are_found_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcompile.format.damage._CHUNK", 300)
    make_dataset(tmp_path / "out", pixels(20), np.arange(20) % 2, shards=(1, 19))
    flip(file_of(tmp_path / "out", "image", 1), ALIGN + 17 * 60)
    flip(file_of(tmp_path / "out", "image", 1), ALIGN + 3 * 60)
    problem = one(tmp_path / "out")
    assert problem.rows == (4, 18)
    assert problem.sources == ("class 0/000004.png", "class 0/000018.png")


def test_a_missing_file_names_all_rows_of_its_shard(root: Path) -> None:
    file_of(root, "image", 2).unlink()
    problem = one(root)
    assert (problem.kind, problem.shard, problem.start, problem.stop, problem.bad_rows, problem.rows) == ("missing", 2, 9, 12, 3, ())


def test_a_short_file_names_the_rows_that_are_gone(root: Path) -> None:
    path = file_of(root, "image", 0)
    os.truncate(path, ALIGN + 3 * 60 + 59)
    problem = one(root)
    assert (problem.kind, problem.rows) == ("short", (3, 4))
    assert f"{ALIGN + 239:,} bytes, expected {ALIGN + 300:,}" in problem.message


def test_an_empty_file_is_short(root: Path) -> None:
    os.truncate(file_of(root, "label", 0), 0)
    problem = one(root)
    assert (problem.kind, problem.bad_rows) == ("short", 5)


@pytest.mark.parametrize("what", ["image", "label", "samples", "keys", "table"])
@pytest.mark.parametrize(("change", "kind"), [(-1, "short"), (1, "long")])
def test_one_byte_more_or_less_is_said(root: Path, what: str, change: int, kind: str) -> None:
    path = file_of(root, what, 1)
    os.truncate(path, path.stat().st_size + change)
    problem = one(root)
    assert (problem.kind, problem.what) == (kind, what)
    assert problem.shard == (None if what == "table" else 1)


def test_swapped_files_are_named_with_what_they_hold(root: Path) -> None:
    a, b = file_of(root, "image", 0), file_of(root, "image", 2)
    data = a.read_bytes(), b.read_bytes()
    a.write_bytes(data[1])
    b.write_bytes(data[0])
    first, second = verify(root).problems
    assert (first.kind, first.shard, second.kind, second.shard) == ("swapped", 0, "swapped", 2)
    assert b.name in first.message
    assert a.name in second.message


def test_a_damaged_samples_file_hides_which_rows_are_bad(root: Path) -> None:
    flip(file_of(root, "samples", 0), ALIGN + 3)
    flip(file_of(root, "image", 0), ALIGN + 3)
    problems = {p.what: p for p in verify(root).problems}
    assert set(problems) == {"samples", "image"}
    assert (problems["image"].bad_rows, problems["image"].rows) == (5, ())
    assert "cannot be told" in problems["image"].message


def test_damaged_keys_leave_rows_without_sources(root: Path) -> None:
    flip(file_of(root, "keys", 0), ALIGN + 3)
    flip(file_of(root, "image", 0), ALIGN + 60)
    problems = {p.what: p for p in verify(root).problems}
    assert (problems["image"].rows, problems["image"].sources) == ((1,), ())
    assert problems["keys"].shard == 0


def test_where_two_fields_of_a_shard_are_bad_both_are_named(root: Path) -> None:
    file_of(root, "label", 0).unlink()
    flip(file_of(root, "image", 0), ALIGN + 60)
    problems = {p.what: p for p in verify(root).problems}
    assert problems["label"].kind == "missing"
    assert (problems["image"].kind, problems["image"].bad_rows, problems["image"].rows) == ("changed", 5, ())


def test_a_file_shared_by_shards_is_a_problem_of_each(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", pixels(8), [0, 1] * 4, shards=(4, 4))
    shared = file_of(tmp_path / "out", "label", 0)
    assert shared == file_of(tmp_path / "out", "label", 1)
    flip(shared, ALIGN + 8)
    report = verify(tmp_path / "out")
    assert [(p.shard, p.rows) for p in report.problems] == [(0, (1,)), (1, (5,))]


def test_a_damaged_table_is_said_and_the_files_are_held_against_their_names(root: Path) -> None:
    flip(file_of(root, "table"), ALIGN + 1)
    problem = one(root)
    assert (problem.what, problem.kind, problem.bad_rows) == ("table", "changed", 12)


def test_with_a_damaged_table_other_damage_is_still_found(root: Path) -> None:
    image = file_of(root, "image", 1)
    flip(image, ALIGN + 1)
    flip(file_of(root, "table"), ALIGN + 1)
    report = verify(root)
    assert {p.path.split("-")[0] for p in report.problems} == {"shards/table", "shards/image"}


def test_older_generations_are_checked_too(root: Path) -> None:
    older = load_index(root)[1]
    only_old = file_of(root, "image", 0)
    newer = small(root, seed=1)
    assert verify(root).generations == (newer, older)
    flip(only_old, ALIGN)
    problem = one(root)
    assert (problem.generations, problem.rows) == ((older,), (0,))
    flip(file_of(root, "label", 0), ALIGN)
    problems = {p.what: p for p in verify(root).problems}
    assert problems["label"].generations == (newer, older)


def test_what_no_generation_names_is_listed_and_no_problem(root: Path) -> None:
    (root / "shards" / ("image-" + "0" * 32 + ".npy")).write_bytes(b"x")
    (root / "shards" / "notes.txt").write_bytes(b"x")
    (root / "generations" / "README").write_bytes(b"x")
    (root / ".build").mkdir()
    (root / ".build" / "lock").write_bytes(b"x")
    report = verify(root)
    assert report.ok
    assert report.extra == ("shards/image-" + "0" * 32 + ".npy",)
    assert report.misnamed == ("generations/README", "shards/notes.txt")


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: p.symlink_to("/dev/zero")])
@pytest.mark.parametrize("what", ["image", "samples", "keys", "table"])
def test_what_is_no_file_is_unreadable(root: Path, what: str, make: object) -> None:
    path = file_of(root, what)
    path.unlink()
    make(path)  # type: ignore[operator]
    problem = one(root)
    assert (problem.kind, problem.what) == ("unreadable", what)


def test_a_missing_index_is_named_while_generations_are_there(root: Path) -> None:
    (root / "index.json").unlink()
    problem = one(root)
    assert (problem.path, problem.kind) == ("index.json", "missing")


@pytest.mark.parametrize("data", [b"", b"\x00", b"[]", b"[" * 100_000])
def test_a_changed_index_is_named(root: Path, data: bytes) -> None:
    (root / "index.json").write_bytes(data)
    problem = one(root)
    assert (problem.path, problem.kind) == ("index.json", "changed")


def test_a_damaged_or_swapped_generation_file_is_named(root: Path) -> None:
    older = load_index(root)[1]
    newer = small(root, seed=1)
    (root / "generations" / f"{older}.json").write_bytes((root / "index.json").read_bytes())
    problem = one(root)
    assert (problem.kind, problem.what, problem.generations) == ("swapped", "generation", (older,))
    assert newer in problem.message


def test_rejects_and_class_files_are_checked(root: Path) -> None:
    def claim(value: dict) -> None:  # type: ignore[type-arg]
        value["rejects"] = {"count": 2, "file": "0" * 32}
        value["classes"] = {"file": "1" * 32}

    change_index(root, claim)
    assert {(p.what, p.kind) for p in verify(root).problems} == {("rejects", "missing"), ("classes", "missing")}


def test_sound_files_that_do_not_fit_each_other_are_unreadable(root: Path) -> None:
    put_array(root, "image", 1, pixels(3))
    (problem,) = verify(root).problems
    assert (problem.kind, problem.what, problem.shard) == ("unreadable", "image", 1)


@pytest.mark.parametrize("stops", [[18, 17, 54, 72, 90], [0, 0, 0, 0, 91], [2**64 - 1] * 5, [18, 36, 54, 72, 89]])
def test_key_offsets_that_do_not_fit_are_unreadable(root: Path, stops: list[int]) -> None:
    samples = np.load(file_of(root, "samples", 0))
    samples["key_stop"] = np.array(stops, np.uint64)
    put_array(root, "samples", 0, samples)
    problem = one(root)
    assert (problem.kind, problem.what, problem.shard) == ("unreadable", "samples", 0)


def test_no_dataset_and_a_newer_one_are_errors(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent", root / "index.json"):
        with pytest.raises(NotADatasetError):
            verify(path)
    change_index(root, lambda value: {"format": "mmcompile", "version": 2})
    with pytest.raises(VersionError, match="install a newer"):
        verify(root)


def test_folders_that_are_links_are_unreadable(root: Path, tmp_path: Path) -> None:
    (root / "shards").rename(tmp_path / "elsewhere")
    (root / "shards").symlink_to(tmp_path / "elsewhere")
    assert any(p.path == "shards" and p.kind == "unreadable" for p in verify(root).problems)


def test_a_sparse_giant_is_not_read(root: Path) -> None:
    os.truncate(file_of(root, "image", 0), 1 << 40)
    problem = one(root)
    assert problem.kind == "long"


def test_an_error_of_the_progress_callback_ends_the_threads(root: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(root, progress=fail)


def test_names_that_are_not_utf8_survive_the_report(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", pixels(2), keys=[b"a\xff.png", b"b.png"])
    flip(file_of(tmp_path / "out", "image"), ALIGN)
    problem = one(tmp_path / "out")
    assert problem.sources == (os.fsdecode(b"a\xff.png"),)
    assert problem.to_json()["sources"] == [{"bytes": "a%FF.png"}]
