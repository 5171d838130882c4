"""Folders side by side: which of them are, how their files find each other, and what is said of those that do not."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler import decode
from mmcompile.compiler.fieldoptions import fields_of
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.choose import Raw, SourceOptions, open_source
from mmcompile.compiler.sources.paired import is_paired
from mmcompile.errors import DecodeError, OptionError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
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
    with pytest.raises(OptionError, match="--field flow: no such field: the folders are image, depth, mask"):
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
    assert scanned(turns).classes == ("left", "right", "straight")


def test_classes_called_images_and_masks_stay_classes(tmp_path: Path) -> None:
    classes, voc = tmp_path / "classes", tmp_path / "voc"
    write(classes, {f"images/{i}.jpg": picture(i, "JPEG") for i in range(6)})
    write(classes, {f"masks/{i}.jpg": picture(i, "JPEG") for i in range(4, 10)})
    assert not is_paired(str(classes))
    assert scanned(classes).classes == ("images", "masks")
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


def test_splits_must_have_the_same_folders(tmp_path: Path) -> None:
    pairs(tmp_path, ["a"], "train/images", "train/masks")
    pairs(tmp_path, ["b"], "val/images", "val/gt")
    with pytest.raises(SourceError, match="split val has a folder of gt, and train none beside train/images"):
        scanned(tmp_path)


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
    run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(resize=(20, 20)))
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
