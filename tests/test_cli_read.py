"""The commands that look after a dataset: verify, info, prune."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from PIL import Image

import mmcompile
from mmcompile.cli import upkeep
from mmcompile.compiler.outcome import Progress
from mmcompile.format.index import load_index
from mmcompile.format.reader import Reader
from mmcompile.format.sampletable import SAMPLE_COLUMNS
from tests.compiler import builds
from tests.format.builders import age, change_index, file_of, pixels, small, tree
from tests.support import make_dataset
from tests.test_cli import EVIL, checked, run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    root = tmp_path / "out"
    small(root)
    return root


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- verify


def test_verify_of_a_sound_dataset(out: Path) -> None:
    before = tree(out)
    result = run("verify", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "every byte is as it was written" in result.stdout
    assert "12 samples" in result.stdout
    document = checked(run("verify", str(out), "--json").stdout)
    assert (document["command"], document["ok"], document["samples"]) == ("verify", True, 12)
    assert tree(out) == before


def test_verify_names_shard_row_and_source_and_ends_with_1(out: Path) -> None:
    path = file_of(out, "image", 1)
    flip(path)
    result = run("verify", str(out))
    assert result.exit_code == 1
    assert path.name in result.stdout
    assert "class 2/000008.png" in result.stdout
    assert f"mmcompile verify {out} --repair RAW" in result.stdout.splitlines()
    result = run("verify", str(out), "--json")
    assert result.exit_code == 1
    (problem,) = checked(result.stdout)["problems"]
    assert (problem["shard"], problem["rows"], problem["sources"]) == (1, [8], ["class 2/000008.png"])


def test_verify_lists_what_nothing_names(out: Path) -> None:
    (out / "shards" / "notes.txt").write_text("mine")
    result = run("verify", str(out))
    assert result.exit_code == 0
    assert "left alone: shards/notes.txt" in result.stdout


def test_many_problems_stay_on_one_screen(out: Path) -> None:
    for path in (out / "shards").iterdir():
        if not path.name.startswith("table"):
            path.unlink()
    result = run("verify", str(out))
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) < 40
    checked(run("verify", str(out), "--json").stdout)


@pytest.mark.parametrize("ok", [True, False])
def test_repair_reports_what_was_mended(out: Path, monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    calls: list[tuple[Any, ...]] = []

    class Repaired:
        def __init__(self) -> None:
            self.ok = ok

        def to_json(self) -> dict[str, Any]:
            missing = {
                "path": "shards/b",
                "reason": "2 sources are gone",
                "sources": [{"key": "cats/1.png", "hash": "0" * 32}, {"key": None, "hash": None}],
                "versions": [{"name": "pillow", "wanted": "12.0.0", "found": "13.0.0"}],
            }
            found = {"problems": [], "repaired": ["shards/a"], "missing": [] if ok else [missing]}
            return {"command": "repair", "root": str(out), "ok": ok, "seconds": 1.0, "decoded": 1, **found}

    def repair(root: Any, raw: Any, *, progress: Any, lock: bool) -> Repaired:
        calls.append((root, raw, lock))
        progress(Progress("verify", 1, 2))
        return Repaired()

    module = types.ModuleType("mmcompile.compiler.repair")
    module.repair = repair  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmcompile.compiler.repair", module)
    result = run("verify", str(out), "--repair", "my raw", "--no-lock")
    assert result.exit_code == (0 if ok else 1)
    assert calls == [(str(out), "my raw", False)]
    assert "repaired shards/a" in result.stdout
    for part in ("shards/b: 2 sources are gone", "needs cats/1.png as it was", "pillow: 12.0.0 is wanted, 13.0.0 is found"):
        assert (part in result.stdout) != ok
    assert checked(run("verify", str(out), "--repair", "my raw", "--json").stdout)["ok"] == ok


# ---------------------------------------------------------------- info


def test_info_is_one_screen_with_all_that_matters(out: Path) -> None:
    settings = {"preprocess": {"resize": 256, "crop": [224, 224], "pad": None}, "source": {"kind": "folder", "include": []}}
    index, _ = load_index(out)
    change_index(out, lambda value: {**value, "settings": settings, "versions": {"pillow": "13.0.0"}})
    result = run("info", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "12 in 3 shards",
        "image: uint8 (3 x 4 x 5), chw on disk",
        "label: int64",
        "3: class 0 4, class 1 4, class 2 4",
        "preprocess: crop [224, 224], resize 256",
        "source: kind folder",
        "pillow 13.0.0",
        "all image: mean ",
        load_index(out)[1] + ", ",
        ", current",
    ):
        assert part in result.stdout, result.stdout
    assert "pad" not in result.stdout
    assert len(result.stdout.splitlines()) <= 24
    assert index.samples == 12
    document = checked(run("info", str(out), "--json").stdout)
    assert document["settings"] == settings


@pytest.mark.parametrize("kinds", [["image"], ["keys", "samples"]])
def test_info_says_how_many_shard_files_are_missing(out: Path, kinds: list[str]) -> None:
    whole = checked(run("info", str(out), "--json").stdout)
    gone = [path for kind in kinds for path in sorted((out / "shards").glob(f"{kind}-*"))[:2]][: 2 * len(kinds) - 1]
    size = sum(path.stat().st_size for path in gone)
    for path in gone:
        path.unlink()
    result = run("info", str(out))
    assert (result.exit_code, result.stderr) == (1, "")
    are = f"{len(gone)} shard file{'s are' if len(gone) > 1 else ' is'}"
    assert result.stdout.splitlines()[-1].startswith(f"{are} missing; `mmcompile verify {out}` names what is wrong")
    result = run("info", str(out), "--json")
    document = checked(result.stdout)
    assert (result.exit_code, document["missing"], whole["missing"]) == (1, len(gone), 0)
    assert document["bytes"] == {name: value - size for name, value in whole["bytes"].items()}


def test_info_of_another_generation(out: Path) -> None:
    _, first = load_index(out)
    small(out, seed=1)
    assert checked(run("info", str(out), "--generation", first, "--json").stdout)["generation"] == first
    assert first in run("info", str(out), "--generation", first).stdout.splitlines()[0]
    result = run("info", str(out), "--generation", "0" * 32)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert checked(run("info", str(out), "--generation", "0" * 32, "--json").stdout)["error"]["type"] == "GenerationError"


def test_info_of_what_is_no_dataset_is_one_line(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        for command in ("info", "verify", "prune"):
            result = run(command, str(place))
            assert (result.exit_code, result.stdout) == (1, "")
            assert len(result.stderr.splitlines()) == 1
            assert checked(run(command, str(place), "--json").stdout)["error"]["type"] == "NotADatasetError"


@pytest.mark.parametrize(
    "strange",
    [
        {"settings": {"a\nb": {"c": [1, None, {"d": "\x1b[2J"}]}, "bytes": 5, "x": {"bytes": "%FF"}}},
        {"settings": {str(i): "v" * 5000 for i in range(50)}},
        {"versions": {"\x1b[2J": "\n"}},
    ],
)
def test_settings_of_a_stranger_are_shown_and_harm_nothing(out: Path, strange: dict[str, Any]) -> None:
    change_index(out, lambda value: {**value, **strange})
    result = run("info", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert all(c == "\n" or c.isprintable() for c in result.stdout)
    assert len(result.stdout) < 20_000
    checked(run("info", str(out), "--json").stdout)


def test_info_writes_the_provenance_of_every_sample_into_a_new_file(tmp_path: Path) -> None:
    root, table = tmp_path / "out", tmp_path / "samples.csv"
    keys = [os.fsencode(EVIL), b"a,b.png", b'"quoted"\r\n.png']
    make_dataset(root, pixels(3), [0, 1, 0], keys=keys, classes=("cats", os.fsdecode(b"\xff")))
    result = run("info", str(root), "--samples", str(table))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"provenance of every sample: {table}"
    with table.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [os.fsencode(row["key"]) for row in rows] == keys
    assert tuple(rows[0]) == SAMPLE_COLUMNS
    assert [row["class"] for row in rows] == ["cats", os.fsdecode(b"\xff"), "cats"]
    before = table.read_bytes()
    result = run("info", str(root), "--samples", str(table))
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert table.read_bytes() == before
    assert checked(run("info", str(root), "--samples", str(tmp_path / "two.csv"), "--json").stdout)["samples_file"] == str(tmp_path / "two.csv")


def test_a_provenance_table_is_not_written_as_what_it_is_not(out: Path, tmp_path: Path) -> None:
    result = run("info", str(out), "--samples", str(tmp_path / "samples.XLSX"))
    assert result.exit_code == 2
    assert "CSV, or Parquet: name a .csv or a .parquet" in result.stderr
    assert not (tmp_path / "samples.XLSX").exists()


def test_a_provenance_table_that_fails_leaves_no_half_file(out: Path, tmp_path: Path) -> None:
    file_of(out, "keys", 2).unlink()
    result = run("info", str(out), "--samples", str(tmp_path / "samples.csv"))
    assert result.exit_code == 1
    assert "keys-" in result.stderr
    assert not (tmp_path / "samples.csv").exists()


def test_no_name_of_a_dataset_reaches_the_terminal_raw(tmp_path: Path) -> None:
    root = tmp_path / os.path.basename(EVIL)
    make_dataset(root, pixels(3), [0, 1, 0], keys=[os.fsencode(EVIL), b"\x1b[2J", b"x"], classes=(os.path.dirname(EVIL), EVIL))
    flip(file_of(root, "image"))
    (root / "shards" / "\x1b[2J").write_text("")
    results = [run(command, str(root)) for command in ("info", "verify", "prune")]
    for result in results:
        for text in (result.stdout, result.stderr):
            assert text == "" or all(c == "\n" or c.isprintable() for c in text), ascii(text)
    for command in ("info", "verify", "prune"):
        checked(run(command, str(root), "--json").stdout)


# ---------------------------------------------------------------- prune


@pytest.fixture
def rebuilt(out: Path) -> tuple[Path, str, str]:
    """Two generations: OUT, the old one, the current one."""
    _, old = load_index(out)
    new = small(out, seed=1)
    age(out, old, 3600)
    return out, old, new


def test_prune_only_lists_where_nobody_can_be_asked(rebuilt: tuple[Path, str, str]) -> None:
    out, old, new = rebuilt
    before = tree(out)
    result = run("prune", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"generation {old}, of " in result.stdout
    assert new in result.stdout
    assert "--yes" in result.stdout
    document = checked(run("prune", str(out), "--json").stdout)
    assert (document["deleted"], [g["name"] for g in document["generations"]]) == (False, [old])
    assert tree(out) == before
    assert "nothing to delete" in run("prune", str(out), "--keep", "2").stdout


@pytest.mark.parametrize("words", [["--yes"], ["--yes", "--json"]])
def test_prune_with_yes_deletes(rebuilt: tuple[Path, str, str], words: list[str]) -> None:
    out, old, new = rebuilt
    result = run("prune", str(out), *words)
    assert result.exit_code == 0
    if "--json" in words:
        assert checked(result.stdout)["deleted"] is True
    else:
        assert "deleted: 1 old generation" in result.stdout
    assert sorted(p.stem for p in (out / "generations").iterdir()) == [new]
    assert old not in run("info", str(out)).stdout
    assert len(Reader(out)) == 12


@pytest.mark.parametrize("answer", [True, False])
def test_prune_asks_on_a_terminal(rebuilt: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    out, _, _ = rebuilt
    asked: list[str] = []
    monkeypatch.setattr(upkeep, "_can_ask", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda text, **_: asked.append(text) or answer)
    result = run("prune", str(out))
    assert result.exit_code == 0
    assert len(asked) == 1
    assert len(list((out / "generations").iterdir())) == (1 if answer else 2)
    assert any(line.startswith("deleted: 1 old generation") for line in result.stdout.splitlines()) == answer


def test_ctrl_c_at_the_question_deletes_nothing(rebuilt: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, _ = rebuilt
    before = tree(out)

    def confirm(text: str, **_: Any) -> bool:
        raise click.Abort

    monkeypatch.setattr(upkeep, "_can_ask", lambda: True)
    monkeypatch.setattr(click, "confirm", confirm)
    result = run("prune", str(out))
    assert (result.exit_code, result.stderr) == (130, "error: stopped\n")
    assert tree(out) == before


# ---------------------------------------------------------------- report and schema


def test_every_key_of_a_report_is_described(out: Path) -> None:
    """A key that the schema lacks, or has too much, is an error on both sides: `additionalProperties` is false, and all are required."""
    for command in ("verify", "info", "prune"):
        document = json.loads(run(command, str(out), "--json").stdout)
        for key in document:
            with pytest.raises(Exception, match="is not valid"):
                checked(json.dumps({k: v for k, v in document.items() if k != key}))
        with pytest.raises(Exception, match="is not valid"):
            checked(json.dumps({**document, "more": 1}))


def test_a_dataset_without_labels_says_so(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", pixels(2))
    assert "samples without labels" in run("info", str(tmp_path / "out")).stdout
    mmcompile.build([([0.0, 1.0], 4), ([2.0, 3.0], 7)], tmp_path / "numbers")
    assert "classes    numbers without names\n" in run("info", str(tmp_path / "numbers")).stdout
    assert dataclasses.asdict(load_index(tmp_path / "out")[0])["classes"] is None


def test_versions_of_pictures_in_python_are_told_as_what_it_was_made_with_and_times_have_no_mean(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    mmcompile.build([(picture, 1), (picture, 0)], tmp_path / "out", preprocess=mmcompile.Preprocess(resize=8, crop=8))
    said = run("info", str(tmp_path / "out")).stdout
    assert "versions." not in said
    assert re.search(r"made with +pixel revision 1,.*pillow [0-9]", said, re.DOTALL)
    times = np.array(["2024-01-01", "2024-01-02", "2024-01-04"], "datetime64[D]")
    mmcompile.build({"t": times, "v": np.arange(6.0).reshape(3, 2)}, tmp_path / "times")
    said = run("info", str(tmp_path / "times")).stdout
    assert "all v: mean 2 3, std" in said
    assert "all t:" not in said


def test_the_config_of_a_dataset_with_rejects_builds_it_again(tmp_path: Path) -> None:
    raw = builds.make_raw(tmp_path / "raw")
    builds.write(raw, {"cat/broken.png": builds.BROKEN})
    assert run("build", str(raw), str(tmp_path / "out"), "--crop", "8", "--max-rejects", "50%").exit_code == 0
    told = run("info", str(tmp_path / "out"), "--config")
    assert json.loads(told.stdout)["max-rejects"] == 1
    (tmp_path / "build.json").write_text(told.stdout)
    again = run("build", str(raw), str(tmp_path / "again"), "--config", str(tmp_path / "build.json"))
    assert again.exit_code == 0
    assert builds.dataset(tmp_path / "again") == builds.dataset(tmp_path / "out")
