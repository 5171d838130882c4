"""Promise 6: what a file does to the process that decodes it is its own affair, and ends in finite time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import DecodeError, EngineError, SourceError
from tests.compiler.builds import BROKEN, SMALL, dataset, expected, images, keys, make_raw, picture, run, write
from tests.compiler.planted import Deadly, Planted, plant

CRASHES = ("segv", "abort", "bus", "fpe")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def planted(raw: Path, notes: Path, *exclude: str) -> Planted:
    return Planted(str(raw), exclude=exclude, parent=os.getpid(), notes=str(notes))


def go(source: Any, out: Path, **more: Any) -> Any:
    return run(source, out, workers=2, options={"decode_timeout_s": 1.0}, **more)


def test_a_crash_twice_is_a_reject_naming_the_file_and_costs_no_neighbour_a_pixel(tmp_path: Path, notes: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=4), tmp_path / "out"
    write(raw, {f"{'cat' if i % 2 else 'dog'}/1.{what}.png": plant(50 + i, what) for i, what in enumerate(CRASHES)})
    with pytest.raises(DecodeError, match=r"4 of 12 images were rejected .4 decoder-crash.") as caught:
        go(planted(raw, notes), out)
    lines = [json.loads(line) for line in Path(caught.value.details["report"]).read_bytes().splitlines()]
    assert [line["key"] for line in lines] == ["cat/1.abort.png", "cat/1.fpe.png", "dog/1.bus.png", "dog/1.segv.png"]
    assert {line["code"] for line in lines} == {"decoder-crash"}
    assert [line["size"] for line in lines] == [(raw / line["key"]).stat().st_size for line in lines]
    assert "SIG" not in json.dumps(lines)
    assert not (out / "index.json").exists()
    report = go(planted(raw, notes), out, max_rejects=4)
    assert (report.decoded, report.samples, report.rejects) == (0, 8, 4)
    assert images(out).tobytes() == expected(raw, SMALL, keys(out)).tobytes()
    go(planted(raw, notes), tmp_path / "fresh", max_rejects=4)
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_a_crash_that_happens_once_leaves_a_row(tmp_path: Path, notes: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=2), tmp_path / "out"
    write(raw, {"cat/once.png": plant(60, "segv-once"), "dog/once.png": plant(61, "kill-once"), "dog/two.png": plant(62, "memory-once")})
    report = go(planted(raw, notes), out)
    assert sorted(p.name for p in notes.iterdir()) == ["kill", "memory", "segv"]
    assert (report.samples, report.rejects) == (7, 0)
    run(raw, tmp_path / "plain")
    assert dataset(out) == dataset(tmp_path / "plain")


def test_what_depends_on_the_machine_is_no_reject_all_else_is_sealed_and_going_on_takes_no_decoding(tmp_path: Path, notes: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=3), tmp_path / "out"
    faults = ("exit", "hang-in-c", "hang", "kill", "memory")  # as text sorts their names
    write(raw, {f"cat/1.{what}.png": plant(70 + i, what) for i, what in enumerate(faults)})
    write(raw, {"dog/0.bad.png": BROKEN})
    with pytest.raises(SourceError, match="5 files could not be read or settled") as caught:
        go(planted(raw, notes), out, max_rejects="100%")
    details = caught.value.details
    assert details["keys"] == [f"cat/1.{what}.png" for what in faults]
    assert details["reasons"] == [
        "its worker ended with exit code 3",
        "took longer than it may",
        "took longer than it may",
        "its worker was killed (out of memory?)",
        "memory",
    ]
    assert not (out / "index.json").exists()
    report = go(planted(raw, notes, *details["keys"]), out, max_rejects="100%")
    assert (report.decoded, report.samples, report.rejects) == (0, 6, 1)
    go(planted(raw, notes, *details["keys"]), tmp_path / "fresh", max_rejects="100%")
    assert dataset(out) == dataset(tmp_path / "fresh")


def test_a_worker_that_dies_between_the_rows_and_the_seal_loses_nothing(tmp_path: Path, notes: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=3), tmp_path / "out"
    write(raw, {"cat/0.bad.png": BROKEN})
    (notes / "die-in-seal").touch()
    report = go(planted(raw, notes), out, max_rejects=1)
    assert not (notes / "die-in-seal").exists()
    assert report.decoded == 6
    run(raw, tmp_path / "plain", max_rejects=1)
    assert dataset(out) == dataset(tmp_path / "plain")


def test_a_header_that_crashes_or_hangs_does_not_stop_the_choice_of_a_size(tmp_path: Path, notes: Path) -> None:
    raw, out = write(tmp_path / "raw", {f"{i}.png": picture(i) for i in range(4)}), tmp_path / "out"
    write(raw, {"0.segv.png": plant(1, "segv"), "1.hang.png": plant(2, "hang")})
    with pytest.raises(SourceError) as caught:
        go(planted(raw, notes), out, preprocess=None)
    assert caught.value.details["keys"] == ["1.hang.png"]
    assert caught.value.details["rejects"] == 1
    report = go(planted(raw, notes, "1.hang.png"), out, preprocess=None, max_rejects=1)
    assert report.shape == (3, 12, 10)
    assert report.decoded == 0


def test_no_size_is_chosen_where_no_header_could_be_read_in_time(tmp_path: Path, notes: Path) -> None:
    raw = write(tmp_path / "raw", {"1.hang.png": plant(2, "hang")})
    with pytest.raises(
        EngineError, match=r"of 1 images not even the headers could be read within \d+ s each: .*say the size: --resize 256 --crop 256"
    ):
        go(planted(raw, notes), tmp_path / "out", preprocess=None)
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_worker_that_dies_while_it_looks_whether_a_seal_still_holds_is_no_end_of_the_run(tmp_path: Path, notes: Path) -> None:
    raw, out = make_raw(tmp_path / "raw", per_class=3), tmp_path / "out"
    write(raw, {"cat/bad.png": BROKEN, "cat/dies-when-read.png": picture(3)})
    with pytest.raises(DecodeError):
        run(FolderSource(str(raw)), out)
    with pytest.raises(SourceError) as caught:
        go(planted(raw, notes), out, max_rejects=1)
    assert caught.value.details["keys"] == ["cat/dies-when-read.png"]


def test_workers_that_end_before_they_begin_are_an_engine_error(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", per_class=1)
    with pytest.raises(EngineError, match=r"workers end before they begin .its worker ended with exit code 7.; check the installation"):
        go(Deadly(FolderSource(str(raw))), tmp_path / "out")


def test_a_large_picture_gets_a_second_more_for_each_megapixel(tmp_path: Path, notes: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    from PIL import Image

    raw.mkdir()
    Image.new("RGB", (7000, 7000)).save(raw / "large.png", compress_level=1)  # 49 megapixels: it takes its turn, and longer than 0.05 s
    write(raw, {"small.png": picture(1)})
    report = run(planted(raw, notes), out, SMALL, options={"decode_timeout_s": 0.4})
    assert report.samples == 2
