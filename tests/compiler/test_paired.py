"""Folders side by side: which of them are, how their files find each other, and what is said of those that do not."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from mmcompile.compiler import decode
from mmcompile.compiler.fieldoptions import fields_of
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.choose import Raw, SourceOptions, open_source
from mmcompile.compiler.sources.paired import is_paired
from mmcompile.errors import DecodeError, OptionError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.summary import build_lines
from tests.compiler.builds import dataset, inline, picture, run, write
from tests.s3 import Bucket


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


def mask(seed: int, size: tuple[int, int] = (10, 12)) -> bytes:
    """A PNG of ids 0, 7 and 255, with a palette."""
    ids = np.random.default_rng(seed).choice(np.array([0, 7, 255], np.uint8), (size[1], size[0]))
    image = Image.fromarray(ids, "P")
    image.putpalette(bytes(range(256)) * 3)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def ids_of(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def pairs(root: Path, names: list[str], images: str = "images", masks: str = "masks") -> Path:
    for i, name in enumerate(names):
        write(root, {f"{images}/{name}.jpg": picture(i, "JPEG"), f"{masks}/{name}.png": mask(i)})
    return root


def source(root: Path | str, **options: Any) -> Any:
    fields = fields_of(options.pop("fields", {}))
    return open_source([str(root)], SourceOptions(fields=fields, **options))


def scanned(root: Path, **options: Any) -> Any:
    return source(root, **options).scan()


def rows_of(out: Path) -> dict[str, Any]:
    reader = Reader(out)
    return {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


@pytest.mark.parametrize(
    ("images", "masks", "field"),
    [
        ("images", "masks", "mask"),
        ("Images", "Annotations", "annotation"),
        ("JPEGImages", "SegmentationClass", "segmentationclass"),
        ("imgs", "gt", "gt"),
        ("img", "ground-truth", "ground_truth"),
        ("image", "labels", "label"),
        ("images", "depths", "depth"),
    ],
)
def test_names_of_folders_say_what_lies_side_by_side(tmp_path: Path, images: str, masks: str, field: str) -> None:
    pairs(tmp_path, ["b", "deep/a"], images, masks)
    scan = scanned(tmp_path, **({"source": "pairs"} if field == "depth" else {}))
    kind = "image" if field == "depth" else "mask"
    assert scan.parts == (("image", "image"), (field, kind))
    assert list(scan.keys) == [f"{images}/b.jpg".encode(), f"{images}/deep/a.jpg".encode()]
    assert [key.beside for key in scan.keys] == [(f"{masks}/b.png".encode(),), (f"{masks}/deep/a.png".encode(),)]
    assert scan.labels is None


@pytest.mark.parametrize("tree", ["{split}/images:{split}/masks", "images/{split}:masks/{split}"])
def test_splits_lie_above_or_below_the_folders(tmp_path: Path, tree: str) -> None:
    images, masks = tree.split(":")
    for split, names in (("train", ["a", "b"]), ("val", ["c"])):
        pairs(tmp_path, names, images.format(split=split), masks.format(split=split))
    scan = scanned(tmp_path)
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 2), ("val", 2, 3)]
    assert list(scan.keys)[2] == f"{images.format(split='val')}/c.jpg".encode()
    named = scanned(tmp_path, source="pairs", split=[f"mine={'images/val' if images.startswith('images') else 'val'}"])
    assert [(s.name, len(named.keys)) for s in named.splits] == [("mine", 1)]


def test_splits_at_the_end_of_names_and_one_without_masks(tmp_path: Path) -> None:
    pairs(tmp_path, ["a", "b"], "imagesTr", "labelsTr")
    write(tmp_path, {"imagesTs/c.jpg": picture(0, "JPEG")})
    scan = scanned(tmp_path)
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 2)]
    assert scan.parts == (("image", "image"), ("label", "mask"))
    assert scan.warnings == ("imagesTs is left out: no folder lies beside it, as in other splits",)


def test_more_than_two_folders_and_one_that_a_field_names(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    pairs(raw, ["a", "b"])
    for name in ("a", "b"):
        write(raw, {f"depth/{name}.png": picture(3, mode="L"), f"thermal/{name}.png": picture(4, mode="L")})
    scan = scanned(raw)
    assert scan.parts == (("image", "image"), ("depth", "image"), ("mask", "mask"))
    assert any("not used, as their names say nothing: thermal" in line for line in scan.warnings)
    assert scan.left_out == {"in no folder of a field": 2}
    fields = {"thermal": {"kind": "image", "mode": "gray"}, "depth": {"mode": "gray"}}
    run(Raw(raw), tmp_path / "out", Preprocess(crop=8, fields=fields))
    assert {name: rows.shape for name, rows in rows_of(tmp_path / "out").items()} == {
        "image": (2, 3, 8, 8),
        "depth": (2, 1, 8, 8),
        "mask": (2, 8, 8),
        "thermal": (2, 1, 8, 8),
    }
    with pytest.raises(OptionError, match=r"--field flow: samples have no such field \(they have image, depth, mask\)"):
        scanned(raw, fields={"flow": {"kind": "image"}})


def test_left_and_right_are_pairs_where_nothing_else_can_be_meant(tmp_path: Path) -> None:
    stereo, classes, turns = tmp_path / "stereo", tmp_path / "classes", tmp_path / "turns"
    for name in ("left", "right"):
        write(stereo, {f"{name}/{i}.jpg": picture(i, "JPEG") for i in range(3)})
        write(classes, {f"{name}/{i}.jpg": picture(i, "JPEG") for i in range(3 if name == "left" else 4)})
        write(turns, {f"{name}/{i}.jpg": picture(i, "JPEG") for i in range(3)})
    write(turns, {"straight/0.jpg": picture(0, "JPEG")})
    assert scanned(stereo).parts == (("left", "image"), ("right", "image"))
    assert scanned(classes).classes == ("left", "right")
    with pytest.raises(OptionError, match=r"--field image: samples have no such field \(they have left, right\)"):
        scanned(stereo, fields={"image": {"mode": "gray"}})
    assert scanned(turns).classes == ("left", "right", "straight")


def test_images_and_masks_that_do_not_pair_are_refused_with_both_remedies(tmp_path: Path) -> None:
    classes, voc = tmp_path / "classes", tmp_path / "voc"
    write(classes, {f"images/{i}.jpg": picture(i, "JPEG") for i in range(6)})
    write(classes, {f"masks/{i}.jpg": picture(i, "JPEG") for i in range(4, 10)})
    assert not is_paired(str(classes))
    with pytest.raises(SourceError, match=r"images and masks are called like images and what belongs to them.* --source folder .* --source pairs"):
        scanned(classes)
    assert scanned(classes, source="folder").classes == ("images", "masks")
    with pytest.raises(SourceError, match="8 files cannot be paired"):
        scanned(classes, source="pairs")
    write(voc, {f"JPEGImages/{i}.jpg": picture(i, "JPEG") for i in range(3)})
    write(voc, {f"Annotations/{i}.xml": b"<annotation/>" for i in range(3)})
    assert not is_paired(str(voc))


def test_a_file_without_a_partner_is_named_with_both_places(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    pairs(raw, ["a", "b", "c"])
    write(raw, {"images/d.jpg": picture(4, "JPEG"), "masks/in/e.png": mask(5)})
    with pytest.raises(SourceError) as found:
        scanned(raw)
    assert str(found.value) == (
        "2 files cannot be paired: masks/in/e.png: no picture in/e in images; images/d.jpg: no file d in masks: add what is missing, take single "
        "ones out with --exclude, or leave out all that lack a partner with --field image:missing=drop and --field mask:missing=drop"
    )
    scan = scanned(raw, fields={"image": {"missing": "drop"}, "mask": {"missing": "drop"}})
    assert len(scan.keys) == 3
    assert scan.left_out == {"without a file in masks": 1, "without a picture in images": 1}
    assert len(scanned(raw, exclude=["images/d.jpg", "masks/in/*"]).keys) == 3
    asked = Preprocess(crop=8, fields={"image": {"missing": "drop"}, "mask": {"missing": "drop"}})
    assert run(Raw(raw), tmp_path / "out", asked).samples == 3


@pytest.mark.parametrize(
    ("images", "masks", "said"),
    [
        ("images/{}.jpg", "masks/{}_mask.png", "names in masks are those in images with _mask at their end"),
        ("images/{}.jpg", "masks/deep/../{}Seg.png", "names in masks are those in images with Seg at their end"),
        ("imagesTr/{}_0000.jpg", "labelsTr/{}.png", "names in imagesTr are those in labelsTr with _0000 at their end"),
    ],
)
def test_one_ending_that_all_files_of_a_folder_share_is_taken_off(tmp_path: Path, images: str, masks: str, said: str) -> None:
    names = ["1", "2", "10", "12"]
    for i, name in enumerate(names):
        write(tmp_path / "raw", {images.format(name): picture(i, "JPEG"), os.path.normpath(masks.format(name)): mask(i)})
    scan = scanned(tmp_path / "raw")
    assert scan.warnings == (said,)
    assert run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=8)).samples == 4
    order = np.argsort([images.format(name) for name in names])
    assert np.array_equal(list(rows_of(tmp_path / "out").values())[1], [ids_of(mask(i))[2:10, 1:9] for i in order])
    write(tmp_path / "raw", {images.format("3"): picture(9, "JPEG")})
    with pytest.raises(SourceError, match=r"1 file cannot be paired: .*: no file 3"):
        scanned(tmp_path / "raw")


def test_exact_names_win_and_no_number_is_cut(tmp_path: Path) -> None:
    pairs(tmp_path / "exact", ["a", "a_mask", "b_mask"])
    assert [key.beside for key in scanned(tmp_path / "exact").keys] == [(f"masks/{name}.png".encode(),) for name in ("a", "a_mask", "b_mask")]
    for i in range(1, 4):
        write(tmp_path / "numbers", {f"images/{i}.jpg": picture(i, "JPEG"), f"masks/{i}0.png": mask(i)})
    assert not is_paired(str(tmp_path / "numbers"))
    with pytest.raises(SourceError, match="6 files cannot be paired"):
        scanned(tmp_path / "numbers", source="pairs")


def test_two_files_of_one_stem_are_named(tmp_path: Path) -> None:
    pairs(tmp_path, ["a", "b"])
    write(tmp_path, {"masks/a.tif": picture(1, "TIFF", mode="L")})
    with pytest.raises(SourceError, match=r"1 files? cannot be paired: masks/a.png and masks/a.tif have one name"):
        scanned(tmp_path)
    assert len(scanned(tmp_path, exclude=["masks/a.tif"]).keys) == 2


def test_of_two_pictures_of_one_stem_none_is_said_to_lack_a_mask(tmp_path: Path) -> None:
    write(pairs(tmp_path, ["a", "b"]), {"images/a.png": picture(3)})
    with pytest.raises(SourceError, match=r"^1 file cannot be paired: images/a.jpg and images/a.png have one name, [^;:]*: add what"):
        scanned(tmp_path)


def test_nothing_is_left_where_all_is_excluded(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nothing is left: --exclude leaves out all 4 files$"):
        scanned(pairs(tmp_path, ["a", "b"]), source="pairs", exclude=("*",))


def test_patterns_of_pictures_take_what_belongs_to_them_along(tmp_path: Path) -> None:
    pairs(tmp_path, ["a", "b", "c"])
    write(tmp_path, {"depth/a.png": picture(0)})
    scan = scanned(tmp_path, include=["images/[ab].jpg"], exclude=["images/b.jpg", "depth", "nothing/*"])
    assert list(scan.keys) == [b"images/a.jpg"]
    assert scan.parts == (("image", "image"), ("mask", "mask"))
    assert scan.warnings == ("--exclude nothing/* matches nothing",)


def test_folders_are_left_out_by_columns_and_by_patterns_of_all_their_files(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    pairs(raw, ["a", "b"])
    write(raw, {"depth/a.png": picture(0), "depth/b.png": picture(1), "labels/a.txt": b"0 0.5 0.5 0.5 1.0\n", "right/a.jpg": picture(2, "JPEG")})
    scan = scanned(raw, columns="mask,depth")
    assert (scan.parts, scan.fields) == ((("image", "image"), ("depth", "image"), ("mask", "mask")), ())
    assert scan.left_out == {"in no folder of a field": 2}
    scan = scanned(raw, columns=["masks", "boxes"])
    assert (scan.parts, len(scan.fields)) == ((("image", "image"), ("mask", "mask")), 3)
    with pytest.raises(OptionError, match="--columns normals: no folder of this name: there are depth, label, mask, right"):
        scanned(raw, columns=["mask", "normals"])
    scan = scanned(raw, exclude=["depth/*", "labels/*.txt", "right/[ab].jpg"])
    assert (scan.parts, scan.warnings, scan.left_out) == ((("image", "image"), ("mask", "mask")), (), {"excluded": 4})
    report = run(Raw(raw, columns=["mask"]), tmp_path / "out", Preprocess(crop=8))
    assert report.fields == ("image", "mask")
    assert any(line.split()[:3] == ["fields", "image,", "mask"] for line in build_lines(report))


def test_splits_must_have_the_same_folders(tmp_path: Path) -> None:
    pairs(tmp_path, ["a"], "train/images", "train/masks")
    pairs(tmp_path, ["b"], "val/images", "val/gt")
    with pytest.raises(SourceError, match="split val has a folder of gt, and train none beside train/images"):
        scanned(tmp_path)


def test_a_field_that_is_the_name_of_a_folder_says_that_folders_lie_side_by_side(tmp_path: Path) -> None:
    for name in ("images", "back", "top"):
        write(tmp_path, {f"{name}/{i}.jpg": picture(i, "JPEG") for i in range(3)})
    assert scanned(tmp_path).classes == ("back", "images", "top")
    made = scanned(tmp_path, fields={"back": {"kind": "image"}})
    assert made.parts == (("image", "image"), ("back", "image"))
    assert any("not used, as their names say nothing: top" in line for line in made.warnings)
    with pytest.raises(SourceError, match=r"beside images lie back, top, and no name says .* --field NAME:kind=image"):
        scanned(tmp_path, source="pairs")


def test_settings_of_a_field_that_is_not_there_come_before_files_without_a_partner(tmp_path: Path) -> None:
    pairs(tmp_path, ["a", "b"], "JPEGImages", "SegmentationClass")
    write(tmp_path, {"JPEGImages/c.jpg": picture(3, "JPEG")})
    with pytest.raises(OptionError, match=r"--field mask: samples have no such field \(they have image, segmentationclass\)"):
        scanned(tmp_path, fields={"mask": {"missing": "drop"}})
    assert len(scanned(tmp_path, fields={"segmentationclass": {"missing": "drop"}}).keys) == 2


@pytest.mark.parametrize(
    ("fields", "said"), [({"mask": {"fill": 3}}, r"\(they have image, label\)"), ({"imgae": {"mode": "gray"}}, "did you mean image")]
)
def test_settings_of_a_field_that_a_folder_of_classes_lacks_are_refused(tmp_path: Path, fields: Any, said: str) -> None:
    write(tmp_path / "raw", {"cats/a.jpg": picture(0, "JPEG"), "dogs/b.jpg": picture(1, "JPEG")})
    with pytest.raises(OptionError, match=f"samples have no such field.*{said}"):
        run(tmp_path / "raw", tmp_path / "out", Preprocess(crop=8, fields=fields))
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_folder_of_pairs_without_pictures_says_what_was_left_out(tmp_path: Path) -> None:
    pairs(tmp_path, ["a", "b"], "images", "masks")
    with pytest.raises(SourceError, match=r"^no images in images: 2 excluded$"):
        scanned(tmp_path, source="pairs", exclude=("images/*.jpg",))


def test_a_folder_without_any_pair_says_what_is_expected(tmp_path: Path) -> None:
    write(tmp_path, {"cats/a.jpg": picture(0, "JPEG")})
    with pytest.raises(SourceError, match="no folders side by side: expected one called images"):
        scanned(tmp_path, source="pairs")


def test_a_build_of_pairs_is_the_same_again_and_copies_rows(tmp_path: Path) -> None:
    pairs(tmp_path / "raw", ["a", "b", "c", "d"])
    asked = Preprocess(crop=8)
    run(Raw(tmp_path / "raw"), tmp_path / "out", asked)
    kept = rows_of(tmp_path / "out")["mask"]
    assert np.array_equal(kept, [ids_of(mask(i))[2:10, 1:9] for i in range(4)])
    write(tmp_path / "raw", {"masks/b.png": mask(77)})
    report = run(Raw(tmp_path / "raw"), tmp_path / "out", asked)
    assert (report.decoded, report.copied + report.kept) == (1, 3)
    run(Raw(tmp_path / "raw"), tmp_path / "clean", asked)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


# -------------------------------------------------------------------- orientation and depth


def turned(orientation: int, tag: bool, *, upright: bool = False) -> bytes:
    """A PNG of ids (16, 24), with EXIF where `tag` says so, or as it stands after that orientation."""
    image = Image.fromarray(np.random.default_rng(orientation).integers(0, 256, (16, 24), np.uint8))
    exif = Image.Exif()
    exif[0x112] = orientation
    out = io.BytesIO()
    image.save(out, "PNG", **({"exif": exif} if tag or upright else {}))
    if not upright:
        return out.getvalue()
    stands = io.BytesIO()
    with Image.open(out) as stored:
        made = ImageOps.exif_transpose(stored)
    made.info = {}
    made.save(stands, "PNG", exif=b"")
    return stands.getvalue()


@pytest.mark.parametrize("masks", ["as stored", "with EXIF of their own", "standing"])
def test_a_mask_stands_as_its_picture_does_whatever_exif_says(tmp_path: Path, masks: str) -> None:
    for turn in range(1, 9):
        beside = turned(turn, masks == "with EXIF of their own", upright=masks == "standing")
        write(tmp_path / "raw", {f"images/{turn}.png": turned(turn, True), f"masks/{turn}.png": beside})
    own: dict[str, Any] = {"orientation": "own"} if masks == "standing" else {}
    asked = Preprocess(crop=12, mode="gray", fields={"mask": {"kind": "mask", **own}})
    report = run(Raw(tmp_path / "raw"), tmp_path / "out", asked)
    rows = rows_of(tmp_path / "out")
    assert np.array_equal(rows["image"][:, 0], rows["mask"])
    assert report.counts == ({} if own else {"mask-turned": 3})
    assert any(line.startswith("  warning    3 masks turned as their images are by EXIF") for line in build_lines(report)) is not bool(own)
    ignored = run(Raw(tmp_path / "raw"), tmp_path / "ignored", replace(asked, orientation="ignore"), max_rejects=8)
    rows = rows_of(tmp_path / "ignored")
    assert ignored.samples == (4 if own else 8)
    assert own or np.array_equal(rows["image"][:, 0], rows["mask"])


def test_a_mask_that_stands_otherwise_names_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "raw", {"images/a.png": turned(6, True), "masks/a.png": turned(6, False)})
    with pytest.raises(DecodeError, match=r"a mask of 24x16 \(width x height\) for a picture of 24x16, which stands as 16x24"):
        run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=12, fields={"mask": {"kind": "mask", "orientation": "own"}}))
    with pytest.raises(OptionError, match="orientation must be one of image, own, found 'apply'"):
        Preprocess(crop=12, fields={"mask": {"orientation": "apply"}})
    with pytest.raises(OptionError, match="--orientation must be one of apply, ignore, found 'own'"):
        Preprocess(crop=12, orientation="own")


def test_a_dtype_of_a_field_keeps_16_bits_as_that_of_the_sample_does(tmp_path: Path) -> None:
    deep = np.arange(120, dtype=np.uint16).reshape(12, 10) * 500
    file = io.BytesIO()
    Image.fromarray(deep).save(file, "PNG")
    write(tmp_path / "raw", {"images/a.jpg": picture(0, "JPEG"), "depth/a.png": file.getvalue(), "masks/a.png": mask(0)})
    for number, (dtype, more) in enumerate([("uint16", {}), ("int32", {}), ("float32", {"scale": "none"}), ("uint16", {"crop": 8})]):
        asked = Preprocess(keep_size=(12, 10), depth16="scale", fields={"depth": {"mode": "gray", "dtype": dtype, **more}})
        run(Raw(tmp_path / "raw"), tmp_path / f"out{number}", asked)
        wanted = deep if "crop" not in more else deep[2:10, 1:9]
        assert np.array_equal(rows_of(tmp_path / f"out{number}")["depth"][0, 0], wanted)
    options = {"mode": "gray", "dtype": "uint16", "depth16": "reject"}
    with pytest.raises(DecodeError) as found:
        run(Raw(tmp_path / "raw"), tmp_path / "refused", Preprocess(crop=8, fields={"depth": options}))
    assert "--depth16 reject refuses: leave it out, and uint16 takes them" in str(found.value)
    assert "--dtype uint16" not in str(found.value)


def test_arrays_are_pictures_beside_others_and_in_a_list_and_a_plain_folder_says_so(tmp_path: Path) -> None:
    values = [np.random.default_rng(i).normal(0, 9, (12, 10)).astype(np.float32) for i in range(2)]
    for i, value in enumerate(values):
        write(tmp_path / "raw", {f"masks/{i}.png": mask(i)})
        file = io.BytesIO()
        np.save(file, value)
        write(tmp_path / "raw", {f"images/{i}.npy": file.getvalue()})
    write(tmp_path, {"list.csv": b"file_name\nraw/images/0.npy\nraw/images/1.npy\n"})
    asked = Preprocess(crop=8, mode="gray", dtype="float32")
    for number, raw in enumerate((tmp_path / "raw", tmp_path / "list.csv")):
        run(Raw(raw), tmp_path / f"out{number}", asked)
        assert np.array_equal(rows_of(tmp_path / f"out{number}")["image"][:, 0], [value[2:10, 1:9] for value in values])
    with pytest.raises(SourceError, match=r"left out were 2 extension .npy; as pictures .npy files come in a list .* alone they are arrays"):
        scanned(tmp_path / "raw" / "images", source="folder")


def test_statistics_of_a_field_count_as_the_field_does(tmp_path: Path) -> None:
    """Ids of organs, and depths in millimetres, are counts, though the pictures beside them go from 0 to 1."""
    depths = np.random.default_rng(0).integers(0, 50_000, (4, 6, 8)).astype(np.uint16)
    for i, deep in enumerate(depths):
        out = io.BytesIO()
        Image.fromarray(deep).save(out, "PNG")
        write(tmp_path / "raw", {f"images/{i}.png": picture(i, "PNG", (8, 6)), f"depth/{i}.png": out.getvalue()})
    own = {"mode": "gray", "dtype": "uint16", "scale": "none", "normalize": "auto"}
    run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(keep_size=(6, 8), fields={"depth": own}))
    index = Reader(tmp_path / "out").index
    deep = next(f for f in index.fields if f.name == "depth")
    assert deep.scale == 1
    assert deep.normalize is not None
    assert np.allclose([deep.normalize[0], deep.normalize[1]], [[depths.mean()], [depths.std()]])
    assert index.statistics["all"]["image"]["mean"][0] < 1


def test_what_a_field_does_not_hold_is_said_with_the_settings_of_that_field(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(np.full((12, 10), 40_000, np.uint16)).save(out, "PNG")
    write(tmp_path / "raw", {"images/a.png": picture(0), "depth/a.png": out.getvalue()})
    with pytest.raises(DecodeError, match=r"depth \(depth/a.png\): .*--field depth:depth16=scale .*--field depth:range=LO:HI, .*depth:dtype=uint16"):
        run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=8))


# -------------------------------------------------------------------- boxes

YAML = {
    "names: [cat, 'a, dog']\nnc: 2\n": ("cat", "a, dog"),
    "path: .\nnames:\n  0: cat  # a pet\n  1: dog\nnc: 2\n": ("cat", "dog"),
    'names:\n- cat\n- "dog\'s"\ntrain: images\n': ("cat", "dog's"),
    "names: {1: dog, 0: cat}\n": ("cat", "dog"),
    "names: ['cat',\n  'dog']\n": ("cat", "dog"),
}


def yolo(root: Path) -> Path:
    for i, name in enumerate(("a", "b", "c")):
        write(root, {f"images/{name}.jpg": picture(i, "JPEG", (40, 20))})
    write(root, {"labels/a.txt": b"1 0.5 0.5 0.5 1.0\n0 0.1 0.5 0.2 0.4\n", "labels/b.txt": b"0 0.75 0.5 0.5 0.5\n"})
    return root


@pytest.mark.parametrize("text", YAML)
def test_boxes_of_text_files_and_names_of_their_classes(tmp_path: Path, text: str) -> None:
    yolo(tmp_path / "raw")
    write(tmp_path / "raw", {"data.yaml": text.encode()})
    assert run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(resize=(20, 20))).left_out == {}
    rows, index = rows_of(tmp_path / "out"), Reader(tmp_path / "out").index
    assert list(rows) == ["image", "boxes", "labels", "boxes_count"]
    assert rows["boxes_count"].tolist() == [2, 1, 0]
    assert rows["labels"].tolist() == [[1, 0], [0, -1], [-1, -1]]
    assert np.allclose(rows["boxes"][:2], [[[5, 0, 15, 20], [0, 6, 4, 14]], [[10, 5, 20, 15], [0, 0, 0, 0]]])
    (labels,) = (f for f in index.fields if f.name == "labels")
    assert labels.categories is not None
    assert labels.categories.listed == YAML[text]


def test_a_text_file_that_changed_moves_its_boxes_and_decodes_nothing(tmp_path: Path) -> None:
    yolo(tmp_path / "raw")
    write(tmp_path / "raw", {"labels/classes.txt": b"cat\ndog\n"})
    run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=20))
    write(tmp_path / "raw", {"labels/b.txt": b"1 0.5 0.5 0.25 0.5\n"})
    report = run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=20))
    assert report.decoded == 0
    rows = rows_of(tmp_path / "out")
    assert (rows["boxes"][1, 0].tolist(), rows["labels"][1, 0]) == ([5, 5, 15, 15], 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 0.5 0.5 x 1", "expected class x y width height, found 0 0.5 0.5 x 1"),
        ("0 0.5 0.5", "expected class and 4 numbers, found 0 0.5 0.5"),
        ("2 0.5 0.5 1 1", "expected a class from 0 to 1, found 2"),
        ("0 20 10 5 5", "expected shares of the picture from 0 to 1, found 20 10 5 5|0 20 10 5 5"),
        ("0 nan 0.5 1 1", "expected class and 4 numbers"),
        ("inf 0.5 0.5 1 1", "expected class and 4 numbers"),
        ("1_0 0.5 0.5 1 1", "expected class x y width height, found 1_0 0.5 0.5 1 1"),
        ("\u0661 0.5 0.5 1 1", "expected class x y width height"),
    ],
)
def test_a_line_that_is_no_box_is_a_reject_naming_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    yolo(tmp_path / "raw")
    write(tmp_path / "raw", {"classes.txt": b"cat\ndog\n", "labels/b.txt": f"\n{line}\n".encode()})
    with pytest.raises(DecodeError):
        run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=8))
    report = run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=8), max_rejects=1)
    assert (report.samples, report.rejects) == (2, 1)
    (reject,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert reject.message.startswith("boxes: labels/b.txt line 2: ")
    assert any(words in reject.message for words in said.split("|"))


@pytest.mark.parametrize("kind", ["1e300", "9223372036854775808", "9007199254740993"])
def test_a_number_of_a_class_is_one_that_can_be_told(tmp_path: Path, kind: str) -> None:
    yolo(tmp_path / "raw")
    write(tmp_path / "raw", {"labels/b.txt": f"{kind} 0.5 0.5 1 1\n".encode()})
    run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(crop=8), max_rejects=1)
    (reject,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert reject.message == f"boxes: labels/b.txt line 1: expected a whole number from 0 to 9007199254740991, found {kind}"


def test_boxes_over_the_maximum_are_refused_or_cut_and_counted(tmp_path: Path) -> None:
    yolo(tmp_path)
    with pytest.raises(SourceError, match=r"labels/a.txt: boxes: a list of 2, and max=1: --field boxes:max=2 keeps all"):
        scanned(tmp_path, fields={"boxes": {"max": 1}})
    scan = scanned(tmp_path, fields={"boxes": {"max": 1, "overflow": "drop"}})
    assert scan.values["boxes_count"].tolist() == [1, 1, 0]
    assert scan.counts == {"boxes": 2, "rows of boxes behind the first 1 of a list, dropped": 1, "images without a file of boxes": 1}
    with pytest.raises(SourceError, match=r"images/c.jpg: no file c in labels"):
        scanned(tmp_path, fields={"boxes": {"missing": "refuse"}})
    assert len(scanned(tmp_path, fields={"boxes": {"missing": "drop"}}).keys) == 2
    pixels = scanned(tmp_path, fields={"boxes": {"format": "xyxy", "relative": False, "min_visibility": 0.5}})
    assert [(form.format, form.relative, form.min_visibility) for _, form in pixels.forms] == [("xyxy", False, 0.5)]


def test_names_of_classes_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    yolo(tmp_path)
    for text, said in (
        ("names: cat\n", "cannot be read"),
        ("names: [a, a]\n", "two classes are called a"),
        ("names: {0: a, 2: b}\n", "cannot be read"),
    ):
        write(tmp_path, {"data.yaml": text.encode()})
        with pytest.raises(SourceError, match=rf"data.yaml: .*{said}"):
            scanned(tmp_path)


def test_pairs_of_an_object_store_are_those_of_the_disk(tmp_path: Path, s3_bucket: Bucket) -> None:
    raw = pairs(yolo(tmp_path / "raw"), ["a", "b", "c"])
    write(raw, {"data.yaml": b"names: [cat, dog]\n"})
    url = s3_bucket.fill({str(path.relative_to(raw)): path.read_bytes() for path in raw.rglob("*") if path.is_file()}, "raw")
    here, there = source(raw), pickle.loads(pickle.dumps(source(url, source="pairs")))
    mine, its = here.scan(), there.scan()
    assert (mine.keys, mine.fields, mine.parts, mine.forms) == (its.keys, its.fields, its.parts, its.forms)
    assert np.array_equal(mine.values, its.values)
    assert [key.beside for key in mine.keys] == [key.beside for key in its.keys]
    assert all(here.read(key) == there.read(key) for key in its.keys)
    assert [there.stat(key) for key in its.keys] == [tuple(stat) for stat in its.stat.tolist()]


def grey(ids: Any, bits: int) -> bytes:
    """A PNG of one channel of these bits."""
    rows = [b"\0" + np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:].reshape(-1)).tobytes() for row in ids]
    header = struct.pack(">IIBBBBB", ids.shape[1], ids.shape[0], bits, 0, 0, 0, 0)
    parts = [b"IHDR" + header, b"IDAT" + zlib.compress(b"".join(rows)), b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)


def test_ids_are_those_in_the_file_and_lossy_masks_are_counted(tmp_path: Path) -> None:
    ids = np.arange(120, dtype=np.uint8).reshape(12, 10)
    for bits in (1, 2, 4):
        write(tmp_path / "raw", {f"images/g{bits}.png": picture(bits), f"masks/g{bits}.png": grey(ids % (1 << bits), bits)})
    for name, how, options in (("lossy", "JPEG", {}), ("kept", "WEBP", {"lossless": True})):
        out = io.BytesIO()
        Image.fromarray(ids).convert("L" if how == "JPEG" else "RGB").save(out, how, **options)
        write(tmp_path / "raw", {f"images/{name}.png": picture(9), f"masks/{name}.{how.lower()}": out.getvalue()})
    report = run(source(tmp_path / "raw", source="pairs"), tmp_path / "out", Preprocess(keep_size=(12, 10)), rows=99)
    assert report.counts == {"lossy-mask": 1}
    reader = Reader(tmp_path / "out")
    keys, masks = reader.keys(0), reader.gather("mask", np.arange(5))
    for bits in (1, 2, 4):
        assert np.array_equal(masks[keys.index(b"images/g%d.png" % bits)], ids % (1 << bits))
    assert np.array_equal(masks[keys.index(b"images/kept.png")], ids)
    with Image.open(io.BytesIO(grey(ids % 16, 4))) as opened:
        found = decode.picture_mask(opened, Preprocess(keep_size=(12, 10), fields={"mask": {"kind": "mask"}}).of("mask"), (10, 12), 1)
    assert np.array_equal(found, ids % 16)


def pgm(ids: Any, white: int) -> bytes:
    """A PGM whose white is this value."""
    return b"P5 %d %d %d\n" % (*ids.shape[::-1], white) + ids.astype(">u2" if white > 255 else "u1").tobytes()


@pytest.mark.parametrize("white", [1, 7, 100, 254, 255, 256, 1000, 40000, 65535])
@pytest.mark.parametrize("plain", [False, True])
def test_ids_of_a_pgm_are_those_in_the_file_whatever_its_white_is(tmp_path: Path, white: int, plain: bool) -> None:
    ids = (np.arange(120).reshape(12, 10) * 331) % (white + 1)
    text = " ".join(map(str, ids.reshape(-1).tolist()))
    data = f"P2 10 12 {white}\n{text}\n".encode() if plain else pgm(ids, white)
    write(tmp_path / "raw", {"images/a.png": picture(0), "masks/a.pgm": data})
    run(source(tmp_path / "raw", source="pairs"), tmp_path / "out", Preprocess(keep_size=(12, 10), fields={"mask": {"dtype": "int32"}}))
    assert np.array_equal(rows_of(tmp_path / "out")["mask"][0], ids)


def test_ids_of_a_mask_that_was_loaded_are_those_in_its_file(tmp_path: Path) -> None:
    options = Preprocess(keep_size=(12, 10), fields={"mask": {"kind": "mask", "dtype": "int32"}}).of("mask")
    ids = np.arange(120, dtype=np.uint8).reshape(12, 10) % 4
    files = {"a.png": grey(ids, 2), "b.pgm": pgm(ids, 9), "c.png": grey(ids, 4)}
    write(tmp_path, files)
    for name, data in files.items():
        at_hand: list[Any] = [tmp_path / name] if name.endswith("pgm") else [tmp_path / name, io.BytesIO(data)]
        for file in at_hand:
            with Image.open(file) as opened:
                opened.load()
                assert np.array_equal(decode.picture_mask(opened, options, (10, 12), 1), ids)
    with Image.open(tmp_path / "a.png") as opened:
        opened.load()
        (tmp_path / "a.png").unlink()
        opened._fp = None  # type: ignore[attr-defined]
        assert np.array_equal(decode.picture_mask(opened, options, (10, 12), 1), ids * 85)


# -------------------------------------------------------------------- real pairs


@pytest.fixture
def real() -> tuple[Path, dict[str, Any]]:
    """The folder of real pairs, and what is known of them."""
    layouts = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if layouts is None:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    root = Path(layouts, "pairs")
    return root, json.loads((root / "expected.json").read_bytes())


@pytest.mark.parametrize("geometry", [{"pad": 500}, {"resize": 128, "crop": 128}, {"resize": (97, 131)}])
def test_masks_of_voc_have_no_class_that_was_not_there(tmp_path: Path, real: tuple[Path, dict[str, Any]], geometry: dict[str, Any]) -> None:
    root, expected = real
    assert run(Raw(root / "voc"), tmp_path / "out", Preprocess(**geometry)).samples == expected["voc_pairs"]
    found = np.unique(rows_of(tmp_path / "out")["mask"]).tolist()
    assert set(found) <= set(expected["voc_mask_values"])
    if "pad" in geometry:  # none of their pixels is left out
        assert found == expected["voc_mask_values"]


def test_cells_of_16_bits_keep_every_id(tmp_path: Path, real: tuple[Path, dict[str, Any]]) -> None:
    root, expected = real
    for name, file in (("images", "img2d.tif"), ("masks", "mask2d.tif")):
        write(tmp_path / "raw", {f"{name}/cells.tif": (root / "cells" / file).read_bytes()})
    kept = {"mask": {"dtype": expected["cells"]["dtype"]}}
    run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(mode="gray", dtype=expected["cells"]["dtype"], fields=kept))
    rows = rows_of(tmp_path / "out")
    for name, file in (("image", "img2d.tif"), ("mask", "mask2d.tif")):
        assert rows[name].dtype == expected["cells"]["dtype"]
        assert np.array_equal(np.squeeze(rows[name]), ids_of((root / "cells" / file).read_bytes()))
    ids = np.unique(rows["mask"])
    assert (len(ids) - 1, int(ids.max())) == (expected["cells"]["instances"], expected["cells"]["max"])
