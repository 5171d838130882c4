"""A static step of the user's own, and rows in a random order: what comes out, and what a rebuild knows of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler.options import BuildOptions, as_config
from mmcompile.compiler.preprocess import Normalize, Preprocess
from mmcompile.compiler.transform import find, transformed
from mmcompile.errors import DecodeError, OptionError
from mmcompile.format.reader import Reader
from tests.compiler.builds import SMALL, age, dataset, images, inline, keys, make_raw, run

STEPS = """
import sys

import numpy as np

def negative(pixels):
    pixels[...] = 255 - pixels
    return pixels

def edges(pixels):
    return np.abs(np.diff(pixels.astype(np.float32).mean(2), axis=0))[:, :, None]

def wide(pixels):
    return pixels.astype(np.int64)

def angry(pixels):
    if pixels[0, 0, 0] % 2:
        raise KeyError("odd")
    return pixels

def leaving(pixels):
    if pixels[0, 0, 0] % 2:
        sys.exit()
    return pixels

def nothing(pixels):
    return None

number = 5
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_steps"
    sys.modules.pop("own_steps", None)
    find.cache_clear()


def test_a_step_of_ones_own_runs_in_workers_and_its_version_decides_a_rebuild(steps: str, tmp_path: Path) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    age(raw)
    run(raw, tmp_path / "plain")
    asked = replace(SMALL, transform=f"{steps}:negative", transform_version="1")
    assert run(raw, out, asked, workers=2).decoded == 12
    assert np.array_equal(images(out), 255 - images(tmp_path / "plain"))
    assert run(raw, out, asked).kept == 12
    assert run(raw, out, replace(asked, dtype="float32")).copied == 12
    again = run(raw, out, replace(asked, transform_version="2"))
    assert (again.decoded, again.copied) == (12, 0)
    assert any("transform_version: 1 -> 2" in line for line in again.changed)


def test_a_step_may_make_another_shape_and_floats(steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    asked = replace(SMALL, transform=f"{steps}:edges", transform_shape=(7, 8, 1), dtype="float32")
    report = run(raw, out, asked)
    run(raw, tmp_path / "plain")
    grey = images(tmp_path / "plain").astype(np.float32).mean(1)
    assert report.shape == (1, 7, 8)
    assert np.allclose(images(out)[:, 0], np.abs(np.diff(grey, axis=1)))
    found = Reader(out).index.statistics["all"]["image"]
    assert found["mean"] == pytest.approx([float(images(out).mean())])


@pytest.mark.parametrize(("step", "found"), [("wide", r"int64 \(8, 8, 3\)"), ("nothing", "NoneType"), ("edges", r"float32 \(7, 8, 1\)")])
def test_what_was_not_declared_ends_the_build_in_one_line(steps: str, tmp_path: Path, step: str, found: str) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(OptionError, match=rf"--transform {steps}:{step} gave {found}; expected an array of uint8 or float32, \(8, 8, 3\)"):
        run(raw, out, replace(SMALL, transform=f"{steps}:{step}"))
    assert not (out / "index.json").exists()


def test_a_picture_that_a_step_raises_on_is_a_reject(steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    report = run(raw, out, replace(SMALL, transform=f"{steps}:angry"), max_rejects=12)
    run(raw, tmp_path / "plain")
    odd = int((images(tmp_path / "plain")[:, 0, 0, 0] % 2).sum())
    assert 0 < odd < 12
    assert report.reject_reasons == {"transform-raised": odd}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_text_that_a_step_raised_with_is_told_once_and_not_in_rejects(steps: str, tmp_path: Path, workers: int) -> None:
    said: list[str] = []
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    run(raw, out, replace(SMALL, transform=f"{steps}:angry"), max_rejects=12, workers=workers, progress=lambda p: said.append(p.message))
    line = STEPS.splitlines().index('        raise KeyError("odd")') + 1
    assert [text for text in said if "--transform" in text] == [f"--transform {steps}:angry: KeyError: 'odd' (own_steps.py line {line})"]
    assert not any(b"odd" in path.read_bytes() for path in out.rglob("*rejects*"))


def test_floats_for_whole_numbers_end_the_build_in_one_line(steps: str, tmp_path: Path) -> None:
    asked = replace(SMALL, transform=f"{steps}:edges", transform_shape=(7, 8, 1))
    with pytest.raises(OptionError, match="gave float32, and --dtype uint8 holds whole numbers: add --dtype float32, or give uint8"):
        run(make_raw(tmp_path / "raw"), tmp_path / "out", asked)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_picture_that_a_step_calls_exit_on_is_a_reject(steps: str, tmp_path: Path, workers: int) -> None:
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    with pytest.raises(DecodeError, match="rejected"):
        run(raw, out, replace(SMALL, transform=f"{steps}:leaving"), workers=workers)
    report = run(raw, out, replace(SMALL, transform=f"{steps}:leaving"), workers=workers, max_rejects=12)
    assert set(report.reject_reasons) == {"transform-raised"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_steps:missing", "AttributeError"),
        ("no_such_module_here:f", "ModuleNotFoundError"),
        ("own_steps:number", "number is int, no function"),
        ("own_steps", "must be package.module:function"),
        ("own_steps:", "must be package.module:function"),
        ("a b:c", "must be package.module:function"),
    ],
)
def test_a_step_that_is_not_there_is_said_before_anything_is_written(steps: str, tmp_path: Path, name: str, said: str) -> None:
    raw = make_raw(tmp_path / "raw", 1)
    with pytest.raises(OptionError, match=said):
        run(raw, tmp_path / "out", replace(SMALL, transform=name))
    assert not (tmp_path / "out").exists()


def test_parts_of_a_step_without_the_step_are_refused() -> None:
    for part in ({"transform_version": "1"}, {"transform_shape": (1, 1, 1)}):
        with pytest.raises(OptionError, match="belongs to --transform"):
            Preprocess(crop=8, **part)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="height x width x channels"):
        Preprocess(crop=8, transform="a:b", transform_shape=(1, 0, 1))


def test_a_step_gets_a_copy_and_keeps_its_units(steps: str) -> None:
    pixels = np.full((8, 8, 3), 7, np.uint8)
    pixels.flags.writeable = False
    made, depth = transformed(pixels, 8, replace(SMALL, transform=f"{steps}:negative").resolved())
    assert (made[0, 0, 0], depth, pixels[0, 0, 0]) == (248, 8, 7)
    assert transformed(pixels, 8, replace(SMALL, transform=f"{steps}:edges", transform_shape=(7, 8, 1), dtype="float32").resolved())[1] == 0
    with pytest.raises(DecodeError, match="raised KeyError on this picture"):
        transformed(pixels, 8, replace(SMALL, transform=f"{steps}:angry").resolved())


# ---------------------------------------------------------------- a random order


def test_rows_in_a_random_order_are_the_same_rows_and_one_more_moves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, out = make_raw(tmp_path / "raw", 30), tmp_path / "out"
    mixed: dict[str, Any] = {"options": {"order": "shuffled:7"}}
    run(raw, tmp_path / "plain")
    run(raw, out, **mixed)
    before, plain = keys(out), keys(tmp_path / "plain")
    assert sorted(before) == sorted(plain)
    assert before != plain
    labels = Reader(out).column("label")
    assert int((np.diff(labels) != 0).sum()) > 10  # sorted by class there is one change
    assert [int(label) for label in labels] == [int(key.startswith(b"dog/")) for key in before]
    place = {key: i for i, key in enumerate(plain)}
    assert np.array_equal(images(out), images(tmp_path / "plain")[[place[key] for key in before]])
    (raw / "cat" / "more.png").write_bytes((raw / "cat" / "0.png").read_bytes() + b"more")
    report = run(raw, out, **mixed)
    assert (report.decoded, report.samples) == (1, 61)
    assert [key for key in keys(out) if key != b"cat/more.png"] == before
    run(raw, tmp_path / "fresh", **mixed)
    assert dataset(out) == dataset(tmp_path / "fresh")
    run(raw, tmp_path / "other", options={"order": "shuffled:8"})
    assert keys(tmp_path / "other") != keys(out)


def test_another_order_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw, out = make_raw(tmp_path / "raw"), tmp_path / "out"
    run(raw, out)
    report = run(raw, out, options={"order": "shuffled"})
    assert (report.decoded, report.copied + report.kept) == (0, 12)
    assert any(line.startswith("order: None -> shuffled:0") for line in report.changed)


@pytest.mark.parametrize("order", ["", "random", "shuffled:", "shuffled:-1", "shuffled:x", "shuffled:1:2"])
def test_an_order_that_is_none_is_refused(order: str) -> None:
    with pytest.raises(OptionError, match="order must be source, shuffled or shuffled:SEED"):
        BuildOptions(order=order)


# ---------------------------------------------------------------- settings as a config file


@pytest.mark.parametrize(
    "asked",
    [
        SMALL,
        Preprocess(resize=(240, 320), crop=200, dtype="float16", normalize=Normalize((0.1, 0.2, 1 / 3), (1.0, 0.5, 1e-9))),
        Preprocess(pad=64, mode="gray", normalize=Normalize((0.5,), (0.5,)), layout="hwc"),
        Preprocess(resize=256, crop=224, compat="torchvision", normalize="imagenet"),
        Preprocess(keep_size=(28, 28), depth16="clip", alpha="#ff0080", icc="srgb", max_aspect=2.5, jpeg_scaling=2),
        Preprocess(crop=9, range=(-1.5, 2.0), filter="lanczos", truncated="accept", frames="error", orientation="ignore"),
        Preprocess(crop=9, transform="a.b:c", transform_version="3", transform_shape=(1, 2, 3), dtype="float32", scale="none"),
        Preprocess(crop=9, mode="keep", kept_mode="L"),
        Preprocess(crop=9, normalize="auto", resampler="pillow"),
    ],
)
def test_settings_as_a_config_are_those_settings(asked: Preprocess) -> None:
    source = {"kind": "folder", "include": [], "exclude": ["a/*"], "hidden": False, "extensions": None}
    settings = {"preprocess": asked.settings(), "source": source, "shard_bytes": 12345, "order": "shuffled:3"}
    config = as_config(settings, "out")
    assert (config.pop("exclude"), config.pop("shard-bytes"), config.pop("order")) == (["a/*"], 12345, "shuffled:3")
    values: dict[str, Any] = {name.replace("-", "_"): tuple(v) if isinstance(v, list) else v for name, v in config.items()}
    if "mean" in values:
        values["normalize"] = Normalize(values.pop("mean"), values.pop("std"))
    if "range" in values:
        low, high = values["range"].split(":")
        values["range"] = (float(low), float(high))
    if asked.kept_mode is not None:  # looked for again
        values["kept_mode"] = asked.kept_mode
    assert Preprocess(**values).settings() == asked.settings()
