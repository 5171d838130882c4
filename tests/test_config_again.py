"""What `info OUT --config` prints builds the same bytes again, for each kind of source that has settings of its own."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mmcompile import cli
from tests.compiler.builds import dataset, inline, make_raw, picture, write


def call(*words: Any) -> str:
    done = CliRunner().invoke(cli.program, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def parted(root: Path) -> list[Path]:
    files = {f"{split}/{name}/{i}.png": picture(10 * i + len(name)) for split in ("fit", "check") for name in ("a", "bb") for i in range(2)}
    return [write(root / "raw", files)]


def several(root: Path) -> list[Path]:
    return [make_raw(root / "one", 2), make_raw(root / "two", 2, seed=50)]


def listed(root: Path) -> list[Path]:
    write(root, {f"{i}.png": picture(i) for i in range(4)})
    (root / "list.csv").write_text("file;kind;size\n" + "".join(f"{i}.png;{'xy'[i % 2]};{i / 2}\n" for i in range(4)))
    return [root / "list.csv"]


def numbers(root: Path) -> list[Path]:
    root.mkdir()
    np.savez(root / "a.npz", x=np.arange(24.0).reshape(6, 4), y=np.arange(6))
    return [root / "a.npz"]


def bars(root: Path) -> list[Path]:
    root.mkdir()
    (root / "bars.csv").write_text("s,ts,v\n" + "".join(f"{'AB'[i % 2]},{i},{i / 8}\n" for i in range(20)))
    return [root / "bars.csv"]


def zipped(root: Path) -> list[Path]:
    root.mkdir()
    with zipfile.ZipFile(root / "a.zip", "w") as archive:
        for i in range(4):
            archive.writestr(f"{'ab'[i % 2]}/{i}.png", picture(i))
    return [root / "a.zip"]


def tarred(root: Path) -> list[Path]:
    root.mkdir()
    with tarfile.open(root / "a.tar", "w") as archive:
        for i in range(4):
            for name, data in ((f"{i}.png", picture(i)), (f"{i}.json", json.dumps({"label": i % 2, "w": i / 2, "z": 1}).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return [root / "a.tar"]


def bare(root: Path) -> list[Path]:
    root.mkdir()
    (root / "bytes").write_bytes(bytes(range(240)))
    return [root / "bytes"]


def compiled(root: Path) -> list[Path]:
    outs = [root / "out1", root / "out2"]
    for seed, out in enumerate(outs):
        call("build", make_raw(root / f"raw{seed}", 2, seed=50 * seed), out, "--crop", 8)
    return outs


def compiled_rows(root: Path) -> list[Path]:
    call("build", *bars(root), root / "out", "--group-by", "s")
    return [root / "out"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (parted, ["--crop", 8, "--split", "train=fit", "--split", "val=check", "--order", "shuffled:3"]),
        (several, ["--resize", "8x8", "--exclude", "*.jpg", "--normalize", "imagenet", "--layout", "hwc"]),
        (listed, ["--crop", 8, "--label-column", "kind", "--columns", "size", "--dtype", "float16", "--mean", "0,0,0.5", "--std", "1,1,0.25"]),
        (numbers, ["--dtype", "float32", "--as", "y=class"]),
        (zipped, ["--crop", 8, "--exclude", "a/0.png"]),
        (tarred, ["--crop", 8, "--columns", "w"]),
        (bare, ["--source", "raw", "--shape", "6x4", "--array-dtype", "<i2", "--as", "x=value"]),
        (compiled, ["--where", "row != 3", "--columns", "label", "--include", "*cat*", "--dtype", "float32", "--normalize", "imagenet"]),
        (compiled_rows, ["--where", "group == 'A' and row < 20", "--columns", "x"]),
        (bars, ["--group-by", "s", "--order-by", "ts", "--split-by", "ts=10", "--normalize", "auto", "--shard-bytes", "64"]),
    ],
)
def test_the_settings_of_a_dataset_build_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, words: list[Any]) -> None:
    inline(monkeypatch)
    raw, out = make(tmp_path / "made"), tmp_path / "out"
    call("build", *raw, out, *words)
    config = tmp_path / "build.json"
    config.write_text(call("info", out, "--config"))
    call("build", *raw, tmp_path / "again", "--config", config)
    assert dataset(tmp_path / "again") == dataset(out)


def test_a_class_map_is_taken_from_the_dataset_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, out = make_raw(tmp_path / "raw", 2), tmp_path / "out"
    (tmp_path / "names").write_text("zebra\ndog\ncat\n")
    call("build", raw, out, "--crop", 8, "--classes-from", tmp_path / "names")
    config = json.loads(call("info", out, "--config"))
    assert config["classes-from"] == str(out)
    (tmp_path / "build.json").write_text(json.dumps(config))
    call("build", raw, tmp_path / "again", "--config", tmp_path / "build.json")
    assert dataset(tmp_path / "again") == dataset(out)


def test_splits_of_several_datasets_are_to_be_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    one, two = compiled(tmp_path)
    call("build", one, two, tmp_path / "out", "--split", f"train={one}", "--split", f"val={two}")
    done = CliRunner().invoke(cli.program, ["info", str(tmp_path / "out"), "--config"])
    assert done.exit_code != 0
    assert "made of several RAW with --split, which is to be given with them again" in str(done.exception or done.output) + done.stderr
