"""Samples with pixels of several fields, and what belongs to them: built, copied, resumed and refused as single pictures are."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.keys import Keys
from mmcompile.compiler.sources.parts import joined_stat, pack, read_item, stat_item, unpack
from mmcompile.compiler.spatial import Form
from mmcompile.errors import DecodeError, OptionError
from mmcompile.format.fields import Field, Names, row_dtype
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import dataset, inline, run, write

BOXES = (
    Field("boxes", "float32", (3, 4), "boxes", count="boxes_count"),
    Field("labels", "int64", (3,), "value", categories=Names(("a", "b")), count="boxes_count"),
    Field("boxes_count", "int64", (), "value"),
)


@dataclass(frozen=True)
class Pairs:
    """Each image of images/ with the mask of the same stem in masks/, and one box, written as `form` says; `wrong` are faults."""

    root: str
    boxes: tuple[tuple[str, tuple[float, float, float, float]], ...] = ()
    form: Form = field(default_factory=Form)
    wrong: tuple[tuple[int, str], ...] = ()
    parallel = 1

    @property
    def _files(self) -> FolderSource:
        return FolderSource(self.root)

    def identity(self) -> dict[str, object]:
        return {"kind": "pairs of a test"}

    def location(self) -> str:
        return self._files.location()

    def scan(self, progress: Callable[[int], None] | None = None) -> Scan:
        names = sorted(path.name for path in (Path(self.root) / "images").iterdir())
        keys = [f"images/{name}".encode() for name in names]
        masks = [f"masks/{Path(name).stem}.png".encode() for name in names]
        stats = [np.array([self._files.stat(key) for key in part], STAT_DTYPE) for part in (keys, masks)]
        fields = BOXES if self.boxes else ()
        values = np.zeros(len(keys), row_dtype(fields))
        for i, name in enumerate(names):
            for k, box in enumerate(box for stem, box in self.boxes if stem == Path(name).stem):
                values[i]["boxes"][k], values[i]["labels"][k], values[i]["boxes_count"] = box, k % 2, k + 1
        if self.boxes:
            gone = np.arange(3) >= values["boxes_count"][:, None]
            values["labels"][gone] = -1
        return Scan(
            Keys.of(keys).with_beside([Keys.of(masks)]),
            fields,
            values,
            joined_stat(stats),
            parts=(("image", "image"), ("mask", "mask")),
            forms=(("boxes", self.form),) if self.boxes else (),
            faults=dict(self.wrong),
        )

    def read(self, key: bytes) -> bytes:
        return read_item(self._files.read, key)

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        return stat_item(self._files.stat, key)


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "workers" not in request.node.name:
        inline(monkeypatch)


def png(array: Any, exif: int = 1, palette: bool = False) -> bytes:
    image = Image.fromarray(array)
    if palette:
        image = image.convert("P") if array.ndim == 3 else Image.fromarray(array, "P")
        image.putpalette(bytes(range(256)) * 3)
    out, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = exif
    image.save(out, "PNG", **({"exif": tags} if exif != 1 else {}))
    return out.getvalue()


def drawn(seed: int, size: tuple[int, int] = (24, 16)) -> tuple[Any, Any, tuple[float, float, float, float]]:
    """(image, mask, box): a rectangle of one colour in an image of (width, height), of id 255 in its mask."""
    rng = np.random.default_rng(seed)
    width, height = size
    x0, x1 = sorted(rng.choice(np.arange(4, width - 3), 2, replace=False).tolist())
    y0, y1 = sorted(rng.choice(np.arange(2, height - 1), 2, replace=False).tolist())
    image, ids = np.zeros((height, width, 3), np.uint8), np.full((height, width), 7, np.uint8)
    image[y0:y1, x0:x1] = 200
    ids[y0:y1, x0:x1] = 255
    return image, ids, (x0, y0, x1, y1)


def make(root: Path, n: int = 5, exif: Callable[[int], int] = lambda i: 1) -> Pairs:
    boxes = []
    for i in range(n):
        image, ids, box = drawn(i)
        write(root, {f"images/{i}.png": png(image, exif(i)), f"masks/{i}.png": png(ids, palette=i % 2 == 0)})
        boxes.append((str(i), tuple(float(v) for v in box)))
    return Pairs(str(root), tuple(boxes))


def rows_of(out: Path) -> dict[str, Any]:
    reader = Reader(out)
    return {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


def test_packed_parts_come_apart_again() -> None:
    for parts in ([b""], [b"a", b"", b"\0" * 9], [b"x" * 300, b"yz"]):
        assert unpack(pack(parts)) == parts
    for bad in (b"1234", pack([b"abc"])[:-1]):
        with pytest.raises(ValueError, match="ends within"):
            unpack(bad)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("geometry", [{"crop": 12}, {"pad": 40}, {"resize": (32, 48)}, {"resize": 32, "crop": (30, 20)}])
def test_mask_and_boxes_go_where_the_pixels_of_their_image_go(tmp_path: Path, orientation: int, geometry: dict[str, Any]) -> None:
    source = make(tmp_path / "raw", 4, lambda i: orientation)
    run(source, tmp_path / "out", Preprocess(filter="nearest", **geometry))
    rows = rows_of(tmp_path / "out")
    for image, ids, boxes, count in zip(rows["image"], rows["mask"], rows["boxes"], rows["boxes_count"], strict=True):
        there = image[0] == 200
        assert np.array_equal(ids == 255, there)
        assert set(np.unique(ids)) <= {0, 7, 255}
        if not there.any():
            assert count == 0 or np.prod(boxes[0, 2:] - boxes[0, :2]) < 4  # of less than a pixel of the sample the nearest may show nothing
            continue
        assert count == 1
        ys, xs = np.nonzero(there)
        found = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
        assert np.abs(boxes[0] - found).max() <= 1.5 if "resize" in geometry or "pad" in geometry else np.array_equal(boxes[0], found)
    assert verify(tmp_path / "out").ok


def test_bytes_do_not_depend_on_workers_and_a_second_build_does_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "raw", 9)
    asked = Preprocess(crop=12)
    one = run(source, tmp_path / "one", asked, rows=2)
    two = run(source, tmp_path / "two", asked, rows=2, workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")
    assert one.fields == ("image", "mask", "boxes", "labels", "boxes_count")
    assert one.shards == two.shards > 1
    again = run(source, tmp_path / "one", asked, rows=2)
    assert (again.decoded, again.copied, again.kept) == (0, 0, 9)


def test_rows_are_copied_and_what_belongs_to_them_is_moved_again(tmp_path: Path) -> None:
    source = make(tmp_path / "raw", 6, lambda i: (1, 6)[i % 2])
    asked = Preprocess(crop=12)
    run(source, tmp_path / "out", asked)
    changed = Pairs(source.root, tuple((stem, (x0, y0, x1 + 1.5, y1)) for stem, (x0, y0, x1, y1) in source.boxes))
    report = run(changed, tmp_path / "out", asked)
    assert (report.decoded, report.copied + report.kept) == (0, 6)
    assert report.copied >= 5  # a shard stays as it is where the crop shows nothing of what changed
    run(changed, tmp_path / "clean", asked)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")
    write(Path(source.root), {"masks/3.png": png(np.full((16, 24), 9, np.uint8))})
    report = run(changed, tmp_path / "out", asked)
    assert (report.decoded, report.copied + report.kept) == (1, 5)


@pytest.mark.parametrize(
    "asked",
    [
        {"crop": 12, "dtype": "float32"},
        {"crop": 12, "layout": "hwc"},
        {"crop": 12, "fields": {"mask": {"kind": "mask"}, "boxes": {"min_visibility": 0.9}}},
    ],
)
def test_what_does_not_touch_the_pixels_of_a_file_decodes_nothing(tmp_path: Path, asked: dict[str, Any]) -> None:
    source = make(tmp_path / "raw", 6, lambda i: (1, 6)[i % 2])
    run(source, tmp_path / "out", Preprocess(crop=12))
    form = Form(min_visibility=0.9) if "fields" in asked else Form()
    changed = Pairs(source.root, source.boxes, form)
    assert run(changed, tmp_path / "out", Preprocess(**asked)).decoded == 0
    run(changed, tmp_path / "clean", Preprocess(**asked))
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_other_settings_of_a_field_are_other_pixels(tmp_path: Path) -> None:
    source = make(tmp_path / "raw", 3)
    run(source, tmp_path / "out", Preprocess(pad=30))
    report = run(source, tmp_path / "out", Preprocess(pad=30, fields={"mask": {"fill": 255}}))
    assert report.decoded == 3
    assert rows_of(tmp_path / "out")["mask"][0, 0, 0] == 255
    with pytest.raises(OptionError, match="field mask: dtype must be one of"):
        run(source, tmp_path / "out", Preprocess(pad=30, fields={"mask": {"dtype": "complex64"}}))


def test_a_relative_box_and_one_that_is_hardly_seen(tmp_path: Path) -> None:
    image = np.zeros((20, 40, 3), np.uint8)
    write(tmp_path / "raw", {"images/0.png": png(image), "masks/0.png": png(image[:, :, 0])})
    boxes = ((0.25, 0.5, 0.5, 1.0), (0.1, 0.5, 0.12, 0.4), (0.7, 0.5, 0.3, 0.5))
    source = Pairs(str(tmp_path / "raw"), tuple(("0", box) for box in boxes), Form("cxcywh", relative=True, min_visibility=0.3))
    run(source, tmp_path / "out", Preprocess(crop=20))
    rows = rows_of(tmp_path / "out")
    # Of the first half is left, of the second nothing; the crop begins at 10.
    assert rows["boxes_count"].tolist() == [2]
    assert np.allclose(rows["boxes"][0], [[0, 0, 10, 20], [12, 5, 20, 15], [0, 0, 0, 0]])
    assert rows["labels"].tolist() == [[0, 0, -1]]
    run(Pairs(source.root, source.boxes, Form("cxcywh", relative=True, min_visibility=0.6)), tmp_path / "out", Preprocess(crop=20))
    assert rows_of(tmp_path / "out")["boxes_count"].tolist() == [1]


FAULTS: dict[str, tuple[bytes, str]] = {
    "another size": (png(np.zeros((15, 24), np.uint8)), "a mask of 24x15 .* for a picture of 24x16"),
    "colours": (png(np.random.default_rng(0).integers(0, 255, (16, 24, 3), np.uint8)), "a mask of mode RGB: colours are no class ids"),
    "ids that do not fit": (png(np.full((16, 24), 300, np.uint16)), "a pixel of the mask is 300, and dtype=uint8 holds 0 to 255"),
    "no image": (b"nothing", "no image of a format that is read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_mask_is_a_reject_that_names_field_and_file(tmp_path: Path, fault: str) -> None:
    source = make(tmp_path / "raw", 3)
    data, said = FAULTS[fault]
    write(tmp_path / "raw", {"masks/1.png": data})
    report = run(source, tmp_path / "out", Preprocess(crop=12), max_rejects=1)
    assert (report.samples, report.rejects) == (2, 1)
    from mmcompile.format.rejects import load_rejects

    (line,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert line.key == "images/1.png"
    with pytest.raises(AssertionError, match=rf"mask \(masks/1.png\): {said}"):
        raise AssertionError(line.message)


def test_a_value_that_does_not_fit_is_a_reject_until_it_does(tmp_path: Path) -> None:
    source = make(tmp_path / "raw", 4)
    wrong = Pairs(source.root, source.boxes, wrong=((2, "score: 300, and dtype=uint8 ends at 255"),))
    with pytest.raises(DecodeError):
        run(wrong, tmp_path / "out", Preprocess(crop=12))
    report = run(wrong, tmp_path / "out", Preprocess(crop=12), max_rejects=1)
    assert (report.samples, report.rejects, report.reject_reasons) == (3, 1, {"value": 1})
    assert run(wrong, tmp_path / "out", Preprocess(crop=12), max_rejects=1).kept == 3
    report = run(source, tmp_path / "out", Preprocess(crop=12))
    assert (report.samples, report.decoded, report.copied + report.kept) == (4, 1, 3)
    run(source, tmp_path / "clean", Preprocess(crop=12))
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")
