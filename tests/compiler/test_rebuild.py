"""Builds into a folder that holds an earlier one: the bytes of a clean build, and no more work than what changed."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mmcompile.compiler import driver, engines, forecast, planning, statcache, task, template
from mmcompile.compiler.driver import BuildReport
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.plan import cuts
from mmcompile.compiler.preprocess import IMAGENET, Normalize, Preprocess
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import BuildError, DecodeError, FormatError, ResumeError
from mmcompile.format.npy import hash_bytes
from mmcompile.format.prune import prune
from mmcompile.format.reader import Reader
from tests.compiler.builds import BROKEN, SMALL, dataset, inline, make_raw, picture, run, shard_stats, snapshot, write


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are old enough to be known by their stat as soon as they are written."""
    monkeypatch.setattr(statcache, "_YOUNG_NS", 0)


def forbid(monkeypatch: pytest.MonkeyPatch, *, reading: bool = False) -> None:
    monkeypatch.setattr(task.decode, "decode", lambda *a, **k: pytest.fail("decoded"))
    if reading:
        monkeypatch.setattr(FolderSource, "read", lambda *a, **k: pytest.fail("read"))


def clean(raw: Path, preprocess: Preprocess | None = SMALL, **more: Any) -> dict[str, bytes]:
    """The dataset of a build into a new folder."""
    folder = raw.parent / "clean"
    shutil.rmtree(folder, ignore_errors=True)
    run(raw, folder, preprocess, max_rejects="100%", **more)
    return dataset(folder)


def sums_up(report: BuildReport) -> bool:
    return report.decoded + report.copied + report.kept == report.samples


# ---------------------------------------------------------------- any edits, any settings


def grey16(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 65536, (12, 10)).astype(np.uint16)).save(out, "PNG")
    return out.getvalue()


#: A few contents, so that files with the same one come up often: pictures, deep ones, broken ones.
CONTENTS = [*(picture(i, "PNG" if i % 2 else "JPEG") for i in range(6)), grey16(1), grey16(2), BROKEN, BROKEN + b"2"]
NAMES = [f"{c}/{n}.{e}" for c in ("cat", "dog", "deep/er") for n in range(4) for e in ("png", "jpg")]
EDITS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(NAMES), st.sampled_from(range(len(CONTENTS)))),
    st.tuples(st.just("rename"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("swap"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.just(0)),
    st.tuples(st.just("touch"), st.sampled_from(NAMES), st.just(0)),
)
SETTINGS = st.builds(
    lambda dtype, layout, normalize, scale, deep: Preprocess(
        crop=8,
        dtype=dtype,
        layout=layout,
        normalize=None if dtype in ("int16", "int32") else normalize,
        scale=scale,
        depth16={"uint8": deep, None: None}.get(dtype),
    ),
    st.sampled_from(["uint8", "uint8", "uint16", "int32", "float16", "bfloat16", "float32", "float64"]),
    st.sampled_from(["chw", "hwc"]),
    st.sampled_from([None, IMAGENET, Normalize((0.5, 0.0, 1.5), (0.25, 1e-3, 3.0))]),
    st.sampled_from(["unit", "none"]),
    st.sampled_from([None, "scale", "clip"]),
)


def edit(raw: Path, how: str, name: str, other: Any) -> None:
    path = raw / name
    if how == "write":
        write(raw, {name: CONTENTS[other]})
    elif path.exists() and how == "remove":
        if sum(p.is_file() for p in raw.rglob("*")) > 2:
            path.unlink()
    elif path.exists() and how == "touch":
        os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    elif path.exists():
        target = raw / other
        target.parent.mkdir(parents=True, exist_ok=True)
        if how == "swap" and target.exists():
            mine, its = path.read_bytes(), target.read_bytes()
            path.write_bytes(its)
            target.write_bytes(mine)
        else:
            path.rename(target)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.lists(EDITS, max_size=4), SETTINGS | st.none(), st.sampled_from([2, 3, 30])), min_size=1, max_size=4), st.booleans())
def test_whatever_changed_a_rebuild_ends_with_the_bytes_of_a_clean_build(tmp_path_factory: Any, steps: list[Any], trust: bool) -> None:
    root = tmp_path_factory.mktemp("any")
    raw, out = make_raw(root / "raw", per_class=3), root / "out"
    write(raw, {"cat/black.png": _plain(0)})  # whatever the settings, there is a row
    preprocess, seen = SMALL, set()
    with pytest.MonkeyPatch.context() as patch:
        inline(patch)
        if trust:
            patch.setattr(statcache, "_YOUNG_NS", 0)
        for edits, changed, rows in [([], None, 3), *steps]:
            for how in edits:
                edit(raw, *how)
            preprocess = changed or preprocess
            report = run(raw, out, preprocess, rows=rows, max_rejects="100%")
            assert sums_up(report)
            assert dataset(out) == clean(raw, preprocess, rows=rows)
            now = {p.read_bytes() for p in raw.rglob("*") if p.is_file()}
            if not now - seen and changed is None:
                assert report.decoded == 0
            seen |= now
            if changed is not None:
                seen = now
    shutil.rmtree(root)


# ---------------------------------------------------------------- what comes after the pixels

FLOATS = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", *FLOATS])
def test_what_is_stored_anew_from_uint8_decodes_nothing(raw: Path, out: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dtype meets all pairs of layouts and all ways to normalise; each pair meets each way in one of the four dtypes of a kind."""
    layouts = list(itertools.product(["chw", "hwc"], ["chw", "hwc"]))
    ways = list(itertools.product([None, IMAGENET] if dtype in FLOATS else [None, None], ["unit", "none"]))
    shift = [*FLOATS, "uint8", "uint16", "int16", "int32"].index(dtype) % 4
    for (old_layout, layout), (normalize, scale) in zip(layouts, ways[shift:] + ways[:shift], strict=True):
        run(raw, out, replace(SMALL, layout=old_layout))
        preprocess = replace(SMALL, dtype=dtype, layout=layout, normalize=normalize, scale=scale)
        with monkeypatch.context() as patch:
            forbid(patch)
            report = run(raw, out, preprocess)
        assert (report.decoded, report.samples) == (0, 12)
        assert sums_up(report)
        assert dataset(out) == clean(raw, preprocess)
        shutil.rmtree(out)


@pytest.mark.parametrize("dtype", ["uint16", "int32", *FLOATS])
def test_rows_of_any_dtype_are_moved_to_the_other_layout_without_decoding(raw: Path, out: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out, replace(SMALL, dtype=dtype))
    preprocess = replace(SMALL, dtype=dtype, layout="hwc")
    with monkeypatch.context() as patch:
        forbid(patch)
        assert run(raw, out, preprocess).copied == 12
    assert dataset(out) == clean(raw, preprocess)


def test_what_only_deep_sources_depend_on_decodes_only_those(raw: Path, out: Path) -> None:
    write(raw, {"cat/deep.png": grey16(1)})
    run(raw, out, replace(SMALL, depth16="scale"))
    for deep in ("clip", "reject"):
        preprocess = replace(SMALL, depth16=deep)
        report = run(raw, out, preprocess, max_rejects=1)
        assert (report.decoded, report.rejects) == ((1, 0) if deep == "clip" else (0, 1))
        assert report.kept > 6  # shards without it stay
        assert dataset(out) == clean(raw, preprocess)


def test_shards_whose_bytes_would_be_the_same_are_not_touched_by_settings_of_others(raw: Path, out: Path) -> None:
    run(raw, out)
    before = shard_stats(out)
    preprocess = replace(SMALL, scale="none", depth16="scale")
    report = run(raw, out, preprocess)
    assert (report.kept, report.copied, report.decoded) == (12, 0, 0)
    assert shard_stats(out) == before
    assert dataset(out) == clean(raw, preprocess)


def test_a_float_that_the_dtype_cannot_hold_is_the_same_reject_as_when_it_is_decoded(raw: Path, out: Path) -> None:
    run(raw, out)
    preprocess = replace(SMALL, dtype="float16", normalize=Normalize((0.0, 0.0, 0.0), (1.0, 1.0, 2e-5)), scale="none")
    with pytest.raises(DecodeError, match="a value is beyond 65504"):
        run(raw, out, preprocess)
    write(raw, {"cat/dark.png": _plain(0)})
    assert run(raw, out, preprocess, max_rejects="100%").samples == 1
    assert dataset(out) == clean(raw, preprocess)


def _plain(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (10, 12), (value, value, value)).save(out, "PNG")
    return out.getvalue()


def test_rejects_found_before_their_depth_matters_are_remembered_for_other_dtypes(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(raw, {"cat/broken.png": BROKEN, "dog/empty.jpg": b""})
    run(raw, out, max_rejects=2)
    preprocess = replace(SMALL, dtype="float32")
    with monkeypatch.context() as patch:
        forbid(patch)
        assert run(raw, out, preprocess, max_rejects=2).rejects == 2
    assert dataset(out) == clean(raw, preprocess)


def test_a_class_put_in_front_changes_labels_and_touches_no_image(raw: Path, out: Path) -> None:
    run(raw, out)
    before = {name: found for name, found in shard_stats(out).items() if name.startswith("image-")}
    write(raw, {"aardvark/0.png": picture(70)})
    report = run(raw, out)
    assert (report.decoded, report.copied) == (1, 12)
    after = shard_stats(out)
    assert {name: after.get(name) for name in before} == before
    assert dataset(out) == clean(raw)


def test_how_jpegs_are_scaled_touches_no_row_of_another_format(raw: Path, out: Path) -> None:
    run(raw, out)
    preprocess = replace(SMALL, resize=8, jpeg_scaling=2.0)
    run(raw, out, replace(SMALL, resize=8))
    report = run(raw, out, preprocess)
    assert (report.decoded, report.copied) == (6, 6)
    assert dataset(out) == clean(raw, preprocess)


# ---------------------------------------------------------------- nothing to do


def everything(out: Path) -> dict[str, Any]:
    """All files and folders of OUT, with what any write to them would change."""
    return {path: (*found, os.lstat(path).st_ctime_ns) for path, found in snapshot(out).items()}


@pytest.mark.parametrize("preprocess", [SMALL, None, replace(SMALL, normalize="auto"), Preprocess(mode="keep", crop=8)])
@pytest.mark.usefixtures("trusted")
def test_where_nothing_changed_nothing_is_written_read_or_looked_at(
    raw: Path, out: Path, preprocess: Preprocess | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(raw, {"cat/broken.png": BROKEN})
    first = run(raw, out, preprocess, max_rejects=1)
    before = everything(out)
    with monkeypatch.context() as patch:
        forbid(patch, reading=True)
        patch.setattr(driver, "Lock", lambda *a, **k: pytest.fail("locked"))
        report = run(raw, out, preprocess, max_rejects=1)
    assert everything(out) == before
    assert (report.kept, report.decoded, report.copied, report.rejects) == (12, 0, 0, 1)
    same = ("samples", "shards", "bytes", "generation", "classes", "shape", "geometry", "counts", "reject_reasons", "rejects_file", "warnings")
    assert [getattr(report, name) for name in same] == [getattr(first, name) for name in same]


@pytest.mark.usefixtures("trusted")
def test_where_nothing_changed_no_process_is_started(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out)
    monkeypatch.setattr(driver, "make_executor", engines.make_executor)
    monkeypatch.setattr(template.Template, "_start", lambda self: pytest.fail("started"))
    assert run(raw, out).kept == 12


@pytest.mark.usefixtures("trusted")
def test_more_rejects_than_allowed_are_said_also_where_nothing_changed(raw: Path, out: Path) -> None:
    write(raw, {"cat/broken.png": BROKEN})
    run(raw, out, max_rejects=1)
    with pytest.raises(DecodeError, match="1 of 13"):
        run(raw, out)
    assert run(raw, out, max_rejects=1).kept == 12


@pytest.mark.usefixtures("trusted")
def test_a_touched_file_is_read_once_and_nothing_is_published_anew(raw: Path, out: Path) -> None:
    run(raw, out)
    before = {path: found for path, found in everything(out).items() if ".build" not in path}
    os.utime(raw / "cat" / "0.png")
    assert run(raw, out).kept == 12
    assert {path: found for path, found in everything(out).items() if ".build" not in path} == before
    whole = everything(out)
    assert run(raw, out).kept == 12
    assert everything(out) == whole


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(
    "what", ["class name", "seal", "no stat cache", "shard gone", "table of samples damaged", "other RAW", "file too many", "file too few"]
)
def test_what_is_not_quite_the_same_is_not_taken_for_it(raw: Path, out: Path, what: str) -> None:
    run(raw, out)
    if what == "class name":
        (raw / "dog").rename(raw / "doh")
    elif what == "seal":
        write(raw, {"dog/broken.png": BROKEN})
        with pytest.raises(DecodeError):
            run(raw, out)
        (raw / "dog" / "broken.png").unlink()
    elif what == "no stat cache":
        (out / ".build" / "stat-cache").unlink()
    elif what == "shard gone":
        next((out / "shards").glob("image-*")).unlink()
    elif what == "table of samples damaged":
        path = next((out / "shards").glob("samples-*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif what == "other RAW":
        shutil.copytree(raw, raw.parent / "copy")
        raw.rename(raw.parent / "was")
        (raw.parent / "copy").rename(raw)
    elif what == "file too many":
        write(raw, {"dog/new.png": picture(70)})
    else:
        (raw / "dog" / "1.jpg").unlink()
    report = run(raw, out)
    assert sums_up(report)
    assert dataset(out) == clean(raw)
    assert not list((out / ".build" / "seals").glob("*")) if (out / ".build" / "seals").exists() else True


@pytest.mark.usefixtures("trusted")
def test_the_choice_of_a_size_is_remembered_as_long_as_the_files_looked_at_are_the_same(
    raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    real = planning.looked_at
    choose = driver.geometry.choose
    monkeypatch.setattr(driver.geometry, "choose", lambda *a: (looked.append(1), choose(*a))[1])
    run(raw, out, None)
    write(raw, {"cat/new.png": picture(71)})
    run(raw, out, None)
    assert len(looked) == 2  # the new file is one of those looked at
    assert len(real(np.arange(5000, dtype=np.uint64))) == 1000
    run(raw, out, None)
    run(raw, out, Preprocess(dtype="float32"))
    assert len(looked) == 3  # other settings
    (raw / "cat" / "0.png").rename(raw / "cat" / "000.png")
    run(raw, out, None)
    assert len(looked) == 4
    assert dataset(out) == clean(raw, None)


# ---------------------------------------------------------------- reading


@pytest.mark.usefixtures("trusted")
def test_checksum_reads_every_file_and_finds_a_change_that_no_stat_tells(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out)
    before = everything(out)
    read: list[bytes] = []
    real = FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda self, key: (read.append(key), real(self, key))[1])
    assert run(raw, out, options={"checksum": True}).kept == 12
    assert sorted(read) == sorted(FolderSource(str(raw)).scan().keys)
    assert {p: f for p, f in everything(out).items() if ".build" not in p} == {p: f for p, f in before.items() if ".build" not in p}
    monkeypatch.setattr(FolderSource, "read", lambda self, key: picture(90) if key == b"cat/0.png" else real(self, key))  # the disk changed it
    assert run(raw, out).kept == 12
    report = run(raw, out, options={"checksum": True})
    assert (report.decoded, report.samples) == (1, 12)


@pytest.mark.usefixtures("trusted")
def test_a_renamed_folder_is_known_by_its_inodes_and_not_read(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out)
    (raw / "cat").rename(raw / "zebra")
    with monkeypatch.context() as patch:
        forbid(patch, reading=True)
        assert run(raw, out).copied > 0
    assert dataset(out) == clean(raw)


# ---------------------------------------------------------------- versions


def use_versions(patch: pytest.MonkeyPatch, **found: str) -> None:
    real = planning.versions_of
    patch.setattr(planning, "versions_of", lambda preprocess: {**real(preprocess), **found})


def test_a_version_that_touches_no_format_that_is_there_stops_nothing(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "raw", {f"{i}.png": picture(i) for i in range(4)})
    run(raw, out)
    use_versions(monkeypatch, libjpeg_turbo="9.9")
    report = run(raw, out)
    assert (report.kept, report.decoded) == (4, 0)
    assert dataset(out) == clean(raw)


def test_another_pillow_is_named_with_the_command_that_brings_the_old_one_back(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out)
    pillow = planning.versions_of(SMALL)["pillow"]
    write(raw, {"dog/new.png": picture(70)})
    use_versions(monkeypatch, pillow="99.0")
    forbid(monkeypatch)
    with pytest.raises(BuildError, match=rf"12 images .*pillow {pillow} -> 99\.0.*`pip install pillow=={pillow}`.*--redecode goes on") as caught:
        run(raw, out)
    assert caught.value.details["pins"] == [f"pillow=={pillow}"]
    (raw / "cat" / "0.png").unlink()
    with pytest.raises(BuildError, match="11 images"):
        run(raw, out)
    monkeypatch.undo()
    inline(monkeypatch)
    use_versions(monkeypatch, pillow="99.0")
    report = run(raw, out, options={"redecode": True})
    assert (report.decoded, report.copied, report.kept) == (12, 0, 0)
    assert dataset(out) == clean(raw)
    # and back again: the older generation has the rows
    monkeypatch.undo()
    inline(monkeypatch)
    with pytest.raises(BuildError, match="1 image would be"):
        run(raw, out)
    (raw / "dog" / "new.png").unlink()
    assert run(raw, out).decoded == 0


def test_seals_of_an_unfinished_build_are_held_against_the_versions_too(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(raw, {"dog/broken.png": BROKEN})
    with pytest.raises(DecodeError):
        run(raw, out)
    use_versions(monkeypatch, pillow="99.0")
    with pytest.raises(BuildError, match="12 images would be decoded again"):
        run(raw, out, max_rejects=1)
    assert run(raw, out, max_rejects=1, options={"redecode": True}).decoded == 12
    assert dataset(out) == clean(raw)


def test_other_settings_decode_without_being_asked_about_versions(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out)
    use_versions(monkeypatch, pillow="99.0")
    assert run(raw, out, replace(SMALL, crop=6)).decoded == 12


# ---------------------------------------------------------------- dry runs


CHANGES: dict[str, Any] = {
    "nothing": lambda raw: None,
    "added": lambda raw: write(raw, {"cat/00.png": picture(70), "dog/x.png": picture(71)}),
    "renamed": lambda raw: (raw / "cat").rename(raw / "zebra"),
    "renamed alike": lambda raw: (raw / "cat").rename(raw / "cow"),
    "changed": lambda raw: write(raw, {"cat/0.png": picture(72)}),
    "broken": lambda raw: (raw / "dog" / "broken.png").rename(raw / "cat" / "moved.png"),
    "removed": lambda raw: (raw / "cat" / "0.png").unlink(),
}


def files_of(out: Path) -> dict[str, int]:
    """The bytes of every file that generations may name; index.json goes by its content."""
    found = [*(out / "generations").iterdir(), *(out / "shards").iterdir()]
    return {path.name: path.stat().st_size for path in found} | {hash_bytes((out / "index.json").read_bytes()): (out / "index.json").stat().st_size}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("preprocess", [SMALL, replace(SMALL, dtype="float32"), replace(SMALL, crop=6)])
@pytest.mark.parametrize(("trust", "rows"), [(False, 3), (True, 3), (True, 100)])
def test_a_dry_run_predicts_counts_and_bytes_and_writes_nothing(
    raw: Path, out: Path, how: str, preprocess: Preprocess, trust: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trust:
        monkeypatch.setattr(statcache, "_YOUNG_NS", 0)
    write(raw, {"dog/broken.png": BROKEN})
    run(raw, out, max_rejects=1, rows=rows)
    CHANGES[how](raw)
    before, files = snapshot(raw.parent), files_of(out)
    with monkeypatch.context() as patch:
        patch.setattr(task, "measure", lambda *a: (1, 1.0))
        foreseen = run(raw, out, preprocess, max_rejects=1, rows=rows, dry_run=True)
    assert snapshot(raw.parent) == before
    report = run(raw, out, preprocess, max_rejects=1, rows=rows)
    known = preprocess.crop == 8 or report.decoded == 0
    assert foreseen.rejects == (1 if known else 0)
    assert (foreseen.decoded - (not known), foreseen.copied, foreseen.kept) == (report.decoded, report.copied, report.kept)
    assert foreseen.samples - (not known) == report.samples
    if known:
        new = sum(size for name, size in files_of(out).items() if name not in files)
        assert foreseen.reject_reasons == report.reject_reasons
        assert abs(foreseen.bytes - report.bytes) <= 2 * forecast.INDEX_ERROR
        assert foreseen.write_bytes is not None
        assert abs(foreseen.write_bytes - new) <= 2 * forecast.INDEX_ERROR
        if how == "nothing" and preprocess == SMALL:
            assert (foreseen.write_bytes, foreseen.bytes) == (0, report.bytes)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(("name", "new"), [("dig", {"keys"}), ("digger", {"keys", "samples"}), ("cat/more", {"keys", "samples", "label"})])
def test_a_dry_run_does_not_count_files_that_stand_under_other_keys(raw: Path, out: Path, name: str, new: set[str]) -> None:
    run(raw, out, rows=100)
    before = files_of(out)
    (raw / "dog").rename(raw / name)  # the same pictures in the same order
    foreseen = run(raw, out, rows=100, dry_run=True)
    run(raw, out, rows=100)
    made = {file: size for file, size in files_of(out).items() if file not in before}
    assert {file.partition("-")[0] for file in made if "-" in file} - {"table"} == new
    assert foreseen.write_bytes is not None
    assert abs(foreseen.write_bytes - sum(made.values())) <= 2 * forecast.INDEX_ERROR


@pytest.mark.parametrize("more", [{}, {"normalize": "auto"}, {"mode": "rgba", "dtype": "float32"}])
@pytest.mark.parametrize("classes", [2, 300])
def test_a_dry_run_of_a_new_dataset_says_how_large_it_becomes(tmp_path: Path, out: Path, classes: int, more: dict[str, Any]) -> None:
    raw = make_raw(tmp_path / "many", 1, [f"class {i}" for i in range(classes)])
    foreseen = run(raw, out, replace(SMALL, **more), dry_run=True)
    report = run(raw, out, replace(SMALL, **more))
    assert abs(foreseen.bytes - report.bytes) <= 2 * forecast.INDEX_ERROR
    assert foreseen.write_bytes == foreseen.bytes


# ---------------------------------------------------------------- damage, other runs


def test_damaged_sealed_shards_are_made_again_with_a_word(raw: Path, out: Path) -> None:
    write(raw, {"dog/broken.png": BROKEN})
    with pytest.raises(DecodeError):
        run(raw, out)
    victim = next((out / "shards").glob("image-*"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    report = run(raw, out, max_rejects=1)
    assert [w for w in report.warnings if w.startswith("1 sealed shard of an unfinished build had been damaged")]
    assert dataset(out) == clean(raw)


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_finished_shard_that_is_damaged_before_publishing_stops_it(raw: Path, out: Path, how: str) -> None:
    def damage(progress: Progress) -> None:
        if progress.stage == "publish":
            victim = next((out / "shards").glob("image-*"))
            victim.unlink() if how == "gone" else os.truncate(victim, 4000)

    with pytest.raises(ResumeError, match="nothing is published: the same command makes it again"):
        run(raw, out, progress=damage)
    assert not (out / "index.json").exists()
    run(raw, out)
    assert dataset(out) == clean(raw)


@pytest.mark.usefixtures("trusted")
def test_what_another_run_did_between_the_plan_and_the_lock_is_seen(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, out)
    run(raw, out, rows=5)
    (raw / "cat" / "0.png").unlink()
    real = driver.Lock

    def late(*args: Any, **more: Any) -> Any:
        prune(out, delete=True)
        return real(*args, **more)

    monkeypatch.setattr(driver, "Lock", late)
    run(raw, out)
    monkeypatch.undo()
    inline(monkeypatch)
    assert dataset(out) == clean(raw)
    assert len(Reader(out)) == 11


def test_what_is_held_of_an_earlier_build_does_not_grow_with_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for rows in (3, 30):
        raw, out = make_raw(tmp_path / f"raw-{rows}", per_class=4 * rows), tmp_path / f"out-{rows}"
        plans: list[Any] = []
        real = driver.Planned
        with monkeypatch.context() as patch:
            patch.setattr(driver, "Planned", lambda *a, real=real, plans=plans: (plans.append(real(*a)), plans[-1])[1])
            write(raw, {"cat/broken.png": BROKEN})
            with pytest.raises(DecodeError):
                run(raw, out, rows=rows)
            run(raw, out, rows=rows, max_rejects=1)  # from seals
            run(raw, out, rows=rows, max_rejects=1)  # from a generation
        assert plans[-1].kept == plans[-2].kept == 8 * rows
        shards = len(Reader(out).table)
        own = [{name: part for name, part in vars(plan.previous).items() if name != "names"} for plan in plans[-2:]]  # which are those of the scan
        held.append([len(pickle.dumps(parts)) / shards for parts in own])
    for few, many in zip(*held, strict=True):
        assert many < 1.3 * few


# ---------------------------------------------------------------- cuts


@pytest.fixture(scope="module")
def insertions() -> list[int]:
    """How many shards each of 1,000 keys put in at random makes others, among 100,000 in shards of about 1,783."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 100_000, dtype=np.uint64)
    old = set(itertools.pairwise(cuts(hashes, 1783)))
    found = []
    for at, new in zip(rng.integers(0, len(hashes) + 1, 1000).tolist(), rng.integers(0, 2**64, 1000, dtype=np.uint64), strict=True):
        now = itertools.pairwise(cuts(np.insert(hashes, at, new), 1783))
        found.append(sum((a, b) not in old if b <= at else (a - 1, b - 1) not in old if a > at else True for a, b in now))
    return found


def test_one_file_among_many_writes_one_or_two_shards_in_most_cases_and_never_more_than_five(insertions: list[int]) -> None:
    assert min(insertions) == 1
    assert sum(n <= 2 for n in insertions) > 500
    assert max(insertions) <= 5


def test_an_unchanged_dataset_without_its_generation_file_is_published_anew(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statcache, "_YOUNG_NS", 0)
    run(raw, out)
    before = dataset(out)
    generation = next((out / "generations").iterdir())
    generation.write_bytes(b"?" + generation.read_bytes()[1:])
    assert run(raw, out).kept == 12
    assert dataset(out) == before
    shutil.rmtree(out / "generations")
    assert run(raw, out).kept == 12
    assert dataset(out) == before
    generation.unlink()
    with pytest.raises(FormatError, match=rf"put its copy back with `cp {out}/index.json {generation}`, or run the same build again"):
        Reader(out)
    assert run(raw, out).kept == 12
    assert dataset(out) == before


def test_a_damaged_table_of_the_published_dataset_stops_a_build_before_it_decodes(raw: Path, out: Path) -> None:
    write(raw, {"dog/broken.png": BROKEN})
    run(raw, out, max_rejects=1)
    before = dataset(out)
    victim = next((out / "shards").glob("table-*"))
    good = victim.read_bytes()
    victim.write_bytes(good[:-2] + b"?\n")
    write(raw, {"dog/new.png": picture(99)})
    with pytest.raises(FormatError, match="verify"):
        run(raw, out, max_rejects=1)
    victim.write_bytes(good)
    assert dataset(out) == before
    report = run(raw, out, max_rejects=1)
    assert (report.decoded, report.decoded + report.copied + report.kept) == (1, 13)


def test_a_dataset_without_its_index_gives_its_rows(raw: Path, out: Path) -> None:
    run(raw, out)
    before = dataset(out)
    (out / "index.json").unlink()
    assert run(raw, out).decoded == 0
    assert dataset(out) == before


def test_checksum_of_unchanged_files_writes_nothing(raw: Path, out: Path) -> None:
    run(raw, out)
    before = snapshot(out)
    assert run(raw, out, options={"checksum": True}).kept == 12
    assert snapshot(out) == before


@pytest.mark.parametrize("kind", ["rejects", "classes", "image", "label", "samples", "keys"])
def test_a_file_that_was_deleted_is_made_again_by_the_same_build(tmp_path: Path, kind: str) -> None:
    raw, out = write(tmp_path / "raw", {f"c{i:03}/0.png": picture(i) for i in range(260)} | {"c000/bad.png": BROKEN}), tmp_path / "out"
    run(raw, out, rows=100, max_rejects=1)
    before = dataset(out)
    path = next(path for path in (out / "shards").iterdir() if path.name.startswith(f"{kind}-"))
    path.unlink()
    assert run(raw, out, rows=100, max_rejects=1).rejects == 1
    assert dataset(out) == before
    if kind == "rejects":  # what has to be read is also made again where it is damaged
        path.write_bytes(b"{}\n")
        assert run(raw, out, rows=100, max_rejects=1).rejects == 1
        assert dataset(out) == before
