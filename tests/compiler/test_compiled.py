"""Datasets as sources: merged, cut and stored anew, selected; copied and never decoded."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import decode
from mmcompile.compiler.driver import BuildReport, build
from mmcompile.compiler.options import as_config
from mmcompile.compiler.preprocess import IMAGENET, Preprocess
from mmcompile.compiler.repair import repair
from mmcompile.compiler.run import Runner
from mmcompile.compiler.sources import choose
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.compiled import CompiledSource
from mmcompile.errors import CorruptShardError, FormatError, OptionError, OutputExistsError, SourceError
from mmcompile.format.index import Names
from mmcompile.format.reader import Reader
from mmcompile.format.store import Store
from mmcompile.format.verify import verify
from tests.compiler.builds import SMALL, dataset, images, inline, keys, make_raw, picture, run, write
from tests.support import make_dataset

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


def source(*raw: Path | str, **options: Any) -> Any:
    return open_source([str(place) for place in raw], SourceOptions(**options))


def merge(
    out: Path, *raw: Path, preprocess: Preprocess | None = None, rows: int = 3, more: dict[str, Any] | None = None, **options: Any
) -> BuildReport:
    return run(source(*raw, **options), out, preprocess, rows=rows, **(more or {}))


def index(out: Path) -> dict[str, Any]:
    return json.loads((out / "index.json").read_bytes())  # type: ignore[no-any-return]


def shards(out: Path) -> Files:
    """The files of a dataset that say nothing of where its rows came from."""
    return {name: data for name, data in dataset(out).items() if name.startswith("shards/")}


def two(tmp_path: Path, preprocess: Preprocess = SMALL) -> tuple[Path, Path, Path, Path]:
    """Two folders of images whose classes differ, and a dataset of each."""
    a, b = make_raw(tmp_path / "a", 7), make_raw(tmp_path / "b", 5, ("ant", "dog"), seed=50)
    outs = tmp_path / "out_a", tmp_path / "out_b"
    for raw, out in zip((a, b), outs, strict=True):
        run(raw, out, preprocess)
    return a, b, *outs


def test_two_datasets_become_what_a_build_from_the_images_of_both_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out_a, out_b = two(tmp_path)
    run(source(a, b), tmp_path / "of_images")
    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode", lambda *args, **more: pytest.fail("decoded"))
        report = merge(tmp_path / "merged", out_a, out_b)
    assert (report.copied, report.decoded, report.classes) == (24, 0, ("ant", "cat", "dog"))
    assert shards(tmp_path / "merged") == shards(tmp_path / "of_images")
    one, other = index(tmp_path / "merged"), index(tmp_path / "of_images")
    assert one["settings"].pop("source") == {"kind": "dataset", "generations": [Reader(out_a).generation, Reader(out_b).generation]}
    del other["settings"]["source"]
    assert one == other
    assert verify(tmp_path / "merged").ok
    assert str(tmp_path).encode() not in b"".join(dataset(tmp_path / "merged").values())


def test_one_dataset_is_cut_anew_and_keeps_its_keys(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 9)
    run(raw, tmp_path / "out", rows=3)
    run(raw, tmp_path / "wide", rows=9)
    merge(tmp_path / "again", tmp_path / "out", rows=9)
    assert shards(tmp_path / "again") == shards(tmp_path / "wide")
    assert len(Reader(tmp_path / "again").table) < len(Reader(tmp_path / "out").table)


@pytest.mark.parametrize(
    "wanted",
    [
        Preprocess(crop=8, dtype="float32", normalize="imagenet", layout="hwc"),
        Preprocess(crop=8, layout="hwc"),
        Preprocess(crop=8, dtype="uint16"),
        Preprocess(crop=8, dtype="bfloat16", scale="none"),
        Preprocess(crop=8, normalize="auto"),
    ],
    ids=["float32", "hwc", "uint16", "bfloat16", "auto"],
)
def test_rows_stored_anew_are_those_of_a_build_with_these_settings(tmp_path: Path, wanted: Preprocess) -> None:
    a, b, out_a, out_b = two(tmp_path)
    run(source(a, b), tmp_path / "of_images", wanted)
    merge(tmp_path / "merged", out_a, out_b, preprocess=wanted)
    assert shards(tmp_path / "merged") == shards(tmp_path / "of_images")
    one, other = index(tmp_path / "merged"), index(tmp_path / "of_images")
    assert one["settings"]["preprocess"] == other["settings"]["preprocess"]
    assert (one["fields"], one["statistics"], one["versions"]) == (other["fields"], other["statistics"], other["versions"])


def test_settings_that_are_not_asked_for_are_those_of_the_datasets(tmp_path: Path) -> None:
    made = Preprocess(crop=8, dtype="float32", normalize="imagenet", layout="hwc")
    _, _, out_a, out_b = two(tmp_path, made)
    merge(tmp_path / "merged", out_a, out_b)
    assert index(tmp_path / "merged")["settings"]["preprocess"] == made.settings()
    assert Preprocess.from_settings(index(tmp_path / "merged")["settings"]["preprocess"]).normalize == IMAGENET


def test_what_rows_do_not_tell_is_refused_with_the_setting_and_both_datasets(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    made = {"a": SMALL, "b": Preprocess(crop=6), "c": Preprocess(crop=8, dtype="float32"), "d": Preprocess(crop=8, layout="hwc")}
    for name, preprocess in made.items():
        run(raw, tmp_path / name, preprocess)
    a, b, c, d = (tmp_path / name for name in made)
    with pytest.raises(OptionError, match=rf"{a} and {b} differ in --crop \(8, 6\); rows are copied, not decoded"):
        merge(tmp_path / "out", a, b)
    with pytest.raises(OptionError, match=rf"{a} and {d} differ in --layout \(chw, hwc\); say which with --layout"):
        merge(tmp_path / "out", a, d)
    with pytest.raises(OptionError, match=r"stored with --dtype float32, and only rows of uint8 can be stored anew"):
        merge(tmp_path / "out", c, preprocess=Preprocess(dtype="uint8"))
    with pytest.raises(OptionError, match=r"--mode gray: the rows of .* were made with rgb"):
        merge(tmp_path / "out", a, preprocess=Preprocess(mode="gray"))
    assert not (tmp_path / "out").exists()
    merge(tmp_path / "out", a, c, preprocess=Preprocess(dtype="float32"))
    assert len(Reader(tmp_path / "out")) == 24


def test_rows_of_more_than_8_bits_are_not_stored_anew(tmp_path: Path) -> None:
    raw = write(make_raw(tmp_path / "raw", 2), {"cat/deep.png": picture(5, mode="L")})
    from PIL import Image

    Image.fromarray(np.arange(120, dtype=np.uint16).reshape(10, 12) * 400).save(raw / "cat" / "deep.png")
    run(raw, tmp_path / "out", Preprocess(crop=8, depth16="scale"))
    with pytest.raises(OptionError, match=r"cat/deep\.png was made of more than 8 bits \(I;16.*--dtype float32"):
        merge(tmp_path / "new", tmp_path / "out", preprocess=Preprocess(dtype="float32"))
    merge(tmp_path / "new", tmp_path / "out", preprocess=Preprocess(dtype="float32"), where="depth == 8 and not key like '*deep.png'")
    assert len(Reader(tmp_path / "new")) == 4
    merge(tmp_path / "same", tmp_path / "out")
    assert shards(tmp_path / "same") == shards(tmp_path / "out")


def test_a_row_that_is_damaged_stops_the_build_and_is_named(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    reader = Reader(out_b)
    path = reader.path("image", 1)
    data = bytearray(path.read_bytes())
    data[4096 + 3] ^= 1
    path.write_bytes(data)
    row, key = int(reader.starts[1]), reader.keys(1)[0].decode()
    with pytest.raises(SourceError, match=rf"1 file .*'1/{key}': row {row} of {out_b} is damaged.*mmcompile verify {out_b}`") as e:
        merge(tmp_path / "merged", out_a, out_b)
    assert e.value.details["keys"] == [f"1/{key}"]
    assert not (tmp_path / "merged" / "index.json").exists()
    data[4096 + 3] ^= 1
    path.write_bytes(data)
    report = merge(tmp_path / "merged", out_a, out_b)
    assert report.kept > 12, "what was sealed is kept"
    merge(tmp_path / "fresh", out_a, out_b)
    assert dataset(tmp_path / "merged") == dataset(tmp_path / "fresh")


def test_a_damaged_row_is_taken_from_where_it_is_sound(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    run(raw, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = Reader(tmp_path / "a").path("image", 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    merge(tmp_path / "merged", tmp_path / "a", tmp_path / "b")
    assert np.array_equal(images(tmp_path / "merged")[: len(images(tmp_path / "b")) // 2], images(tmp_path / "merged")[:6])
    assert verify(tmp_path / "merged").ok


@pytest.mark.parametrize("kind", ["samples", "keys", "label"])
def test_damaged_provenance_is_an_error_that_names_the_file(tmp_path: Path, kind: str) -> None:
    _, _, out_a, out_b = two(tmp_path)
    path = Reader(out_b).path(kind, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=path.name):
        merge(tmp_path / "merged", out_a, out_b)
    path.unlink()
    with pytest.raises(CorruptShardError, match=rf"{path.name}: missing; run `mmcompile verify {out_b}"):
        merge(tmp_path / "merged", out_a, out_b)
    assert not (tmp_path / "merged").exists()


def test_nothing_is_written_where_nothing_changed_and_inputs_never_are(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)

    def state(folder: Path) -> dict[str, int]:
        return {str(p): os.stat(p).st_mtime_ns for p in [folder, *folder.rglob("*")]}

    before = state(out_a), state(out_b)
    merge(tmp_path / "merged", out_a, out_b)
    made = state(tmp_path / "merged")
    report = merge(tmp_path / "merged", out_a, out_b)
    assert (report.kept, report.copied) == (24, 0)
    assert state(tmp_path / "merged") == made
    assert (state(out_a), state(out_b)) == before


def test_a_new_generation_of_an_input_copies_what_changed(tmp_path: Path) -> None:
    a, _, out_a, out_b = two(tmp_path)
    merge(tmp_path / "merged", out_a, out_b)
    write(a, {"cat/new.png": picture(99)})
    run(a, out_a)
    report = merge(tmp_path / "merged", out_a, out_b)
    assert report.decoded == 0
    assert 0 < report.copied < 16
    merge(tmp_path / "fresh", out_a, out_b)
    assert dataset(tmp_path / "merged") == dataset(tmp_path / "fresh")


def test_the_bytes_do_not_depend_on_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, out_a, out_b = two(tmp_path)
    merge(tmp_path / "merged", out_a, out_b)
    found = decode.versions
    monkeypatch.setattr(decode, "versions", lambda *of, **more: dict.fromkeys(found(*of, **more), "99"))
    merge(tmp_path / "later", out_a, out_b)
    assert dataset(tmp_path / "later") == dataset(tmp_path / "merged")
    report = merge(tmp_path / "merged", out_a, out_b)
    assert report.kept == 24


def test_datasets_of_other_versions_are_refused_where_a_row_depends_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", {f"{i}.png": picture(i) for i in range(4)})
    write(tmp_path / "b", {f"{i}.png": picture(10 + i) for i in range(4)})
    run(tmp_path / "a", tmp_path / "out_a")
    found = decode.versions
    changed = "zlib"

    def versions(*of: Any, **more: Any) -> dict[str, str]:
        return {name: "99" if name == changed else version for name, version in found(*of, **more).items()}

    monkeypatch.setattr(decode, "versions", versions)
    needed = found("PNG")
    for changed, fits in (("libjpeg_turbo", True), (next(n for n in needed if n != "pillow") if len(needed) > 1 else "pillow", False)):
        shutil.rmtree(tmp_path / "out_b", ignore_errors=True)
        run(tmp_path / "b", tmp_path / "out_b")
        if fits:
            merge(tmp_path / "merged", tmp_path / "out_a", tmp_path / "out_b")
            assert index(tmp_path / "merged")["versions"] == index(tmp_path / "out_a")["versions"]
        else:
            with pytest.raises(OptionError, match=rf"out_a and .*out_b differ in {changed} \(.*, 99\); .* --redecode"):
                merge(tmp_path / "merged", tmp_path / "out_a", tmp_path / "out_b")


def test_rows_are_selected_by_what_is_known_of_them(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    wanted = [key for key in (b"0/" + k for k in keys(out_a)) if key.endswith(b".png")]
    report = merge(tmp_path / "png", out_a, out_b, where="format == 'PNG' and dataset == 0 and class in ('cat', 'dog') and width == 10")
    assert keys(tmp_path / "png") == wanted
    assert report.left_out == {"not selected": 24 - len(wanted)}
    assert report.classes == ("ant", "cat", "dog"), "a class that no row is left of keeps its number"
    merge(tmp_path / "rows", tmp_path / "png", where="row >= 1 and label == 1")
    assert all(key.startswith(b"0/cat/") for key in keys(tmp_path / "rows"))
    with pytest.raises(SourceError, match="none of the 24 rows is taken"):
        merge(tmp_path / "none", out_a, out_b, where="width > 5000")
    with pytest.raises(OptionError, match=r"there is no 'widht' here \(did you mean width\?\); known are class, dataset"):
        merge(tmp_path / "none", out_a, out_b, where="widht > 5000")
    merge(tmp_path / "globs", out_a, out_b, include=("0/*",), exclude=("0/dog/*",))
    assert {key[:6] for key in keys(tmp_path / "globs")} == {b"0/cat/"}
    assert not (tmp_path / "none").exists()


def test_rows_are_selected_by_number_and_stand_as_in_their_datasets(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    rows = tmp_path / "rows.txt"
    rows.write_bytes(b"23\r\n2\n15\n0\n\n")
    run(source(out_a, out_b, rows=str(rows)), tmp_path / "picked", None)
    all_keys = [b"0/" + k for k in keys(out_a)] + [b"1/" + k for k in keys(out_b)]
    assert sorted(keys(tmp_path / "picked")) == sorted(all_keys[row] for row in (0, 2, 15, 23))
    np.save(tmp_path / "rows.npy", np.array([0, 2, 15, 23], np.uint16))
    run(source(out_a, out_b, rows=str(tmp_path / "rows.npy")), tmp_path / "same", None)
    assert dataset(tmp_path / "same") == dataset(tmp_path / "picked")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"1\ntwo\n", r"line 2: expected the number of a row, found 'two'"),
        (b"1\n\n2\n", r"line 2: expected the number of a row, found an empty line"),
        (b"-1\n", r"line 1: expected the number of a row, found '-1'"),
        (b"3\n1\n24\n", r"line 3: there is no row 24; expected 0 to 23"),
        (b"3\n1\n3\n", r"line 1 and line 3 are both row 3"),
        (b"\x93NUMPY\x01\x00", r"line 1: expected the number of a row"),
    ],
)
def test_a_wrong_list_of_rows_is_refused_with_its_line(tmp_path: Path, data: bytes, why: str) -> None:
    _, _, out_a, out_b = two(tmp_path)
    (tmp_path / "rows.txt").write_bytes(data)
    with pytest.raises(OptionError, match=why):
        source(out_a, out_b, rows=str(tmp_path / "rows.txt"))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (np.array([1.0]), r"expected an array \(N,\) of whole numbers, found float64 \(1,\)"),
        (np.zeros((2, 2), np.int64), r"found int64 \(2, 2\)"),
        (np.array([1, -1]), r"entry 2: there is no row -1"),
        (np.array([1 << 63], np.uint64), r"expected numbers of rows"),
        (np.array([{}], object), r"no \.npy file"),
    ],
)
def test_a_wrong_array_of_rows_is_refused(tmp_path: Path, rows: Any, why: str) -> None:
    _, _, out_a, out_b = two(tmp_path)
    np.save(tmp_path / "rows.npy", rows, allow_pickle=True)
    with pytest.raises(OptionError, match=why):
        source(out_a, out_b, rows=str(tmp_path / "rows.npy"))
    with pytest.raises(OptionError, match="cannot be read"):
        source(out_a, out_b, rows=str(tmp_path / "none.npy"))


def test_splits_of_one_name_are_one_and_stand_as_those_of_folders(tmp_path: Path) -> None:
    for name, parts in {"a": ("train", "test"), "b": ("val", "train")}.items():
        for at, part in enumerate(parts):
            make_raw(tmp_path / name / part, 3, seed=10 * at + ord(name))
        run(tmp_path / name, tmp_path / f"out_{name}")
    run(source(tmp_path / "a", tmp_path / "b"), tmp_path / "of_images")
    merge(tmp_path / "merged", tmp_path / "out_a", tmp_path / "out_b")
    assert [s["name"] for s in index(tmp_path / "merged")["splits"]] == ["train", "val", "test"]
    assert shards(tmp_path / "merged") == shards(tmp_path / "of_images")
    assert index(tmp_path / "merged")["statistics"] == index(tmp_path / "of_images")["statistics"]
    merge(tmp_path / "val", tmp_path / "out_a", tmp_path / "out_b", where="split in ('val', 'test')")
    assert [s["name"] for s in index(tmp_path / "val")["splits"]] == ["val", "test"]


def test_whole_datasets_are_splits_where_that_is_said_and_else_nobody_guesses(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    merge(tmp_path / "merged", out_a, out_b, split=(f"val={out_a}", f"train={out_b}"))
    assert index(tmp_path / "merged")["splits"] == [{"name": "train", "start": 0, "stop": 10}, {"name": "val", "start": 10, "stop": 24}]
    with pytest.raises(OptionError, match=r"merged has splits \(train, val\) and .*out_a none: say which split it is, as in --split train="):
        merge(tmp_path / "more", tmp_path / "merged", out_a)
    with pytest.raises(OptionError, match="expected one of the datasets given"):
        source(out_a, out_b, split=(f"val={out_a}/cat",))


def test_classes_are_those_of_a_fixed_map_and_one_that_is_not_in_it_is_refused(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    (tmp_path / "names").write_text("dog\ncat\nant\nyak\n")
    merge(tmp_path / "merged", out_a, out_b, classes_from=str(tmp_path / "names"))
    assert Reader(tmp_path / "merged").classes == ("dog", "cat", "ant", "yak")
    folders = ["dog", "cat", "ant", "yak"]
    labels = Reader(tmp_path / "merged").gather("label", np.arange(24)).tolist()
    assert labels == [folders.index(key.split(b"/")[1].decode()) for key in keys(tmp_path / "merged")]
    (tmp_path / "names").write_text("dog\ncat\n")
    with pytest.raises(OptionError, match=r"--classes-from: .*out_b has rows of class ant, which is not in it"):
        merge(tmp_path / "fewer", out_a, out_b, classes_from=str(tmp_path / "names"))


def test_a_shuffled_dataset_keeps_its_order_and_a_merge_can_be_shuffled(tmp_path: Path) -> None:
    a, b, out_a, out_b = two(tmp_path)
    run(a, tmp_path / "mixed", options={"order": "shuffled:3"})
    merge(tmp_path / "same", tmp_path / "mixed")
    assert keys(tmp_path / "same") == keys(tmp_path / "mixed")
    run(source(a, b), tmp_path / "of_images", options={"order": "shuffled"})
    merge(tmp_path / "merged", out_a, out_b, more={"options": {"order": "shuffled"}})
    assert shards(tmp_path / "merged") == shards(tmp_path / "of_images")


def test_parts_of_a_merge_make_the_same_bytes(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    merge(tmp_path / "whole", out_a, out_b)
    merge(tmp_path / "parts", out_a, out_b, more={"options": {"plan_only": True}})
    for part in ("0/2", "1/2"):
        merge(tmp_path / "parts", out_a, out_b, more={"options": {"part": part}})
    report = merge(tmp_path / "parts", out_a, out_b)
    assert (report.copied, report.kept) == (0, 24)
    assert dataset(tmp_path / "parts") == dataset(tmp_path / "whole")


def test_a_dry_run_writes_nothing_and_counts_copies(tmp_path: Path) -> None:
    _, _, out_a, out_b = two(tmp_path)
    report = merge(tmp_path / "merged", out_a, out_b, more={"dry_run": True})
    assert (report.copied, report.decoded, report.samples) == (24, 0, 24)
    assert not (tmp_path / "merged").exists()


def test_what_is_given_must_be_datasets_each_once_and_apart_from_out(tmp_path: Path) -> None:
    a, _, out_a, out_b = two(tmp_path)
    with pytest.raises(OptionError, match=rf"{a} is no dataset, and {out_b} is to be read as one"):
        source(a, out_b)
    with pytest.raises(OptionError, match="the same dataset; give it once"):
        source(out_a, f"{out_a}/")
    with pytest.raises(OutputExistsError, match="inside RAW"):
        merge(out_a, out_a, out_b)
    with pytest.raises(OptionError, match="--where does not go with this RAW, which is read as folder"):
        source(a, where="row > 3")
    with pytest.raises(OptionError, match="a dataset on a store is no source"):
        source("memory://bucket/out", source="dataset")
    assert isinstance(source(out_a), CompiledSource)
    assert [kind.name for kind in choose.KINDS][-1] == "folder"


def test_datasets_of_other_fields_are_refused(tmp_path: Path) -> None:
    make_raw(tmp_path / "a")
    write(tmp_path / "flat", {f"{i}.png": picture(i) for i in range(4)})
    run(tmp_path / "a", tmp_path / "out_a")
    run(tmp_path / "flat", tmp_path / "out_b")
    with pytest.raises(OptionError, match=r"differ in what stands beside the images: label in the first alone; .*the images alone with --columns ,"):
        source(tmp_path / "out_a", tmp_path / "out_b")
    merge(tmp_path / "again", tmp_path / "out_b")
    assert shards(tmp_path / "again") == shards(tmp_path / "out_b")


def test_the_fields_beside_the_images_are_chosen(tmp_path: Path) -> None:
    for name, header in (("a", "score"), ("b", "weight,score")):
        raw = write(tmp_path / name, {f"{i}.png": picture(i) for i in range(4)})
        rows = [f"{i}.png,{'xy'[i % 2]}," + ",".join(str(i + k) for k in range(len(header.split(",")))) for i in range(4)]
        (raw / "list.csv").write_text("\n".join([f"file,label,{header}", *rows]))
        run(source(raw / "list.csv"), tmp_path / f"out_{name}")
    outs = tmp_path / "out_a", tmp_path / "out_b"
    with pytest.raises(OptionError, match=r"differ in .*: weight in the second alone; .*: keep what all have with --columns label,score"):
        source(*outs)
    merge(tmp_path / "merged", *outs, columns=("label", "score"))
    reader = Reader(tmp_path / "merged")
    assert [f.name for f in reader.index.fields] == ["image", "label", "score"]
    rows = np.arange(8)
    assert reader.gather("score", rows).tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert reader.gather("label", rows).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert verify(tmp_path / "merged").ok
    config = as_config(reader.index.settings, str(tmp_path / "merged"))
    assert config["columns"] == "label,score"
    merge(tmp_path / "some", *outs, columns=("score",), where="class == 'y' and label == 1 and score < 4")
    assert Reader(tmp_path / "some").gather("score", np.arange(3)).tolist() == [1, 3, 2]
    with pytest.raises(OptionError, match="there is no 'weight' here"):
        merge(tmp_path / "none", *outs, columns=("score",), where="weight > 1")
    merge(tmp_path / "bare", *outs, columns=())
    assert [f.name for f in Reader(tmp_path / "bare").index.fields] == ["image"]
    assert Reader(tmp_path / "bare").index.classes is None
    assert images(tmp_path / "bare").tobytes() == np.concatenate([images(out) for out in outs]).tobytes()
    with pytest.raises(OptionError, match=r"--columns lable: .*out_a has no such column; did you mean label\?"):
        source(*outs, columns=("lable",))


@pytest.mark.parametrize("damage", ["lost", "empty", "cut", "hand"])
def test_a_dataset_without_its_index_is_recognised_and_its_index_is_put_back(tmp_path: Path, damage: str) -> None:
    run(make_raw(tmp_path / "raw", 2), tmp_path / "out")
    out = tmp_path / "out"
    index_path, data = out / "index.json", (out / "index.json").read_bytes()
    generation = Reader(out).generation
    if damage == "lost":
        index_path.unlink()
    else:
        index_path.write_bytes({"empty": b"", "cut": data[:300], "hand": data.replace(b'"samples":4', b'"samples": 4')}[damage])
    command = f"cp {out}/generations/{generation}.json {index_path}"
    with pytest.raises(FormatError, match=re.escape(f"`{command}`, then run `mmcompile verify {out}`")):
        source(out)
    with pytest.raises(FormatError, match=re.escape(command)):
        Reader(out)
    report = verify(out)
    assert [problem.path for problem in report.problems] == ["index.json"]
    assert command in report.problems[0].message
    subprocess.run(shlex.split(command), check=True)
    assert verify(out).ok
    assert isinstance(source(out), CompiledSource)


def test_what_is_left_of_a_dataset_is_no_folder_of_arrays(tmp_path: Path) -> None:
    run(make_raw(tmp_path / "raw", 2), tmp_path / "out")
    (tmp_path / "out" / "index.json").unlink()
    shutil.rmtree(tmp_path / "out" / "generations")
    with pytest.raises(FormatError, match=r"its index.json is missing; no generation is left whole .*: build again with `mmcompile build RAW"):
        source(tmp_path / "out")
    with pytest.raises(SourceError, match="expected arrays of one dtype and shape"):
        source(tmp_path / "out", source="npy-folder").scan()


@pytest.mark.parametrize("kind", ["image", "samples", "keys", "label"])
def test_a_merged_dataset_is_mended_by_the_build_that_made_it(tmp_path: Path, kind: str) -> None:
    a, _, out_a, out_b = two(tmp_path)
    merge(tmp_path / "merged", out_a, out_b)
    before = dataset(tmp_path / "merged")
    path = Reader(tmp_path / "merged").path(kind, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not verify(tmp_path / "merged").ok
    with pytest.raises(
        OptionError, match=r"its rows are copied from datasets.*delete the files that `mmcompile verify` names.*run the same build again"
    ):
        repair(tmp_path / "merged", a)
    path.unlink()
    report = merge(tmp_path / "merged", out_a, out_b)
    assert 0 < report.copied < 24
    assert dataset(tmp_path / "merged") == before
    assert verify(tmp_path / "merged").ok


def test_what_a_killed_build_has_sealed_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, out_a, out_b = two(tmp_path)
    merge(tmp_path / "whole", out_a, out_b)
    sealed = Runner._sealed

    def dies(self: Any, future: Any) -> None:
        sealed(self, future)
        if self.counts.copied > 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_sealed", dies)
        with pytest.raises(KeyboardInterrupt):
            merge(tmp_path / "merged", out_a, out_b)
    report = merge(tmp_path / "merged", out_a, out_b)
    assert report.kept > 0
    assert report.copied + report.kept == 24
    assert dataset(tmp_path / "merged") == dataset(tmp_path / "whole")


def test_the_settings_are_a_config_but_for_a_list_of_rows(tmp_path: Path) -> None:
    _, _, out_a, _ = two(tmp_path)
    merge(tmp_path / "some", out_a, where="class == 'cat'", rows=5)
    config = as_config(index(tmp_path / "some")["settings"], "some")
    assert (config["source"], config["where"], "generations" in config) == ("dataset", "class == 'cat'", False)
    (tmp_path / "rows").write_text("1\n2\n")
    run(source(out_a, rows=str(tmp_path / "rows")), tmp_path / "rows_of", None)
    with pytest.raises(OptionError, match="--rows FILE; its settings hold the hash"):
        as_config(index(tmp_path / "rows_of")["settings"], "rows_of")


def test_a_merge_into_a_store_copies_from_disks_and_from_the_store(tmp_path: Path) -> None:
    a, _, out_a, out_b = two(tmp_path)
    url = f"memory://{tmp_path.name}/merged"
    for step in range(2):
        run(source(out_a, out_b), url, None)
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        merge(tmp_path / "merged", out_a, out_b)
        expected = dataset(tmp_path / "merged")
        assert {name: Store(url).read(name) for name in expected} == expected
        write(a, {f"cat/new{step}.png": picture(90 + step)})
        run(a, out_a)


def test_values_go_along_and_categories_are_one_list_of_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    settings = {"preprocess": SMALL.settings(), "source": {"kind": "manifest"}, "shard_bytes": 1 << 28}
    breeds = {"a": ("pug", "fox"), "b": ("fox", "cur", "pug")}
    made = {}
    for name, names in breeds.items():
        values = {"age": rng.normal(size=5).astype("f4"), "breed": rng.integers(-1, len(names), 5), "box": rng.integers(0, 9, (5, 4))}
        made[name] = values
        pixels = rng.integers(0, 256, (5, 3, 8, 8)).astype(np.uint8)
        facts = {"breed": {"categories": names}}
        make_dataset(tmp_path / name, pixels, shards=(2, 3), settings=settings, values=values, facts=facts)
    merge(tmp_path / "merged", tmp_path / "a", tmp_path / "b")
    reader, rows = Reader(tmp_path / "merged"), np.arange(10)
    for name in ("age", "box"):
        assert np.array_equal(reader.gather(name, rows), np.concatenate([made[d][name] for d in "ab"]))
    names = ("cur", "fox", "pug")
    assert next(f for f in reader.index.fields if f.name == "breed").categories == Names(names)
    wanted = ["" if n < 0 else breeds[d][n] for d in "ab" for n in made[d]["breed"].tolist()]
    assert ["" if n < 0 else names[n] for n in reader.gather("breed", rows).tolist()] == wanted
    assert verify(tmp_path / "merged").ok
    merge(tmp_path / "pugs", tmp_path / "a", tmp_path / "b", where="breed == 'pug' and age > 0")
    ages = np.concatenate([made[d]["age"] for d in "ab"])
    assert Reader(tmp_path / "pugs").gather("age", np.arange(len(keys(tmp_path / "pugs")))).tolist() == [
        age for age, name in zip(ages.tolist(), wanted, strict=True) if name == "pug" and age > 0
    ]


def test_a_path_alone_is_recognised_by_the_library(tmp_path: Path) -> None:
    _, _, out_a, _ = two(tmp_path)
    report = build(out_a, tmp_path / "copy")
    assert report.copied == 14
    assert keys(tmp_path / "copy") == keys(out_a)
