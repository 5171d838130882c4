"""Members of tar archives beside the image of a sample: masks and further pictures, arrays, texts and lists, as fields of it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile import Raw
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.archive import ArchiveSource
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.errors import MMCompileError, OptionError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.verify import verify
from tests.compiler.builds import dataset, inline, run
from tests.compiler.test_archive import tar


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "workers" not in request.node.name:
        inline(monkeypatch)


def png(array: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def ids(i: int) -> Any:
    made = np.full((16, 24), 7, np.uint8)
    made[2 : 6 + i % 3, 9:15] = (0, 255)[i % 2]
    return made


def samples(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    """A picture that shows its mask, that mask, and a grey picture beside it."""
    out = []
    for i in range(start, start + count):
        out += [
            (f"{i:03}.depth.png", png(ids(i) // 2)),
            (f"{i:03}.png", png(np.stack([ids(i)] * 3, -1))),
            (f"{i:03}.seg.png", png(ids(i))),
        ]
    return out


def source(*raw: Path, **more: Any) -> ArchiveSource:
    found = open_source([str(path) for path in raw], SourceOptions(**more))
    assert isinstance(found, ArchiveSource)
    return found


def rows_of(out: Path) -> dict[str, Any]:
    reader = Reader(out)
    return {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


def test_masks_and_pictures_beside_the_image_are_fields_that_move_with_it(tmp_path: Path) -> None:
    tar(tmp_path / "raw/a.tar", samples(4))
    tar(tmp_path / "raw/b.tar", samples(3, 4))
    report = run(tmp_path / "raw", tmp_path / "out", Preprocess(crop=12, fields={"depth": {"mode": "gray"}}))
    assert report.fields == ("image", "depth", "seg")
    found = {f.name: (f.meaning, f.shape) for f in Reader(tmp_path / "out").index.fields}
    assert found == {"image": ("image", (3, 12, 12)), "depth": ("image", (1, 12, 12)), "seg": ("mask", (12, 12))}
    rows = rows_of(tmp_path / "out")
    for i in range(7):
        cut = ids(i)[2:14, 6:18]
        assert np.array_equal(rows["seg"][i], cut)
        assert np.array_equal(rows["image"][i], [cut] * 3)
        assert np.array_equal(rows["depth"][i, 0], cut // 2)
    assert verify(tmp_path / "out").ok


def test_bytes_do_not_depend_on_workers_and_a_second_build_does_nothing(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", samples(6))
    asked = Preprocess(crop=12)
    run(raw, tmp_path / "one", asked, rows=2)
    run(raw, tmp_path / "two", asked, rows=2, workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")
    again = run(raw, tmp_path / "one", asked, rows=2)
    assert (again.decoded, again.copied, again.kept) == (0, 0, 6)


def test_a_member_without_a_partner_is_named_with_both_places(tmp_path: Path) -> None:
    files = samples(3)
    raw = tar(tmp_path / "a.tar", [file for file in files if file[0] != "001.seg.png"])
    with pytest.raises(SourceError, match=r"001\.depth\.png \(byte [\d,]+\) has no seg beside it, and 000\.seg\.png \(byte "):
        source(raw).scan()
    assert source(raw, exclude=("*.seg.png",)).scan().parts == (("image", "image"), ("depth", "image"))
    raw = tar(tmp_path / "b.tar", [file for file in files if file[0] != "002.png"])
    with pytest.raises(SourceError, match=r"002\.depth\.png \(byte [\d,]+\) has no image beside it, and 000\.png \(byte 1,536\)"):
        source(raw).scan()


def test_what_is_asked_for_by_name_is_taken(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", samples(2))
    assert source(raw, image_column="depth.png").scan().parts == (("image", "image"),)
    assert source(raw, image_column="depth.png", columns=("seg",)).scan().parts == (("image", "image"), ("seg", "mask"))
    assert source(raw, columns=("depth",)).scan().parts == (("image", "image"), ("depth", "image"))
    scan = source(raw, fields={"depth": {"kind": "mask"}}).scan()
    assert scan.parts == (("image", "image"), ("depth", "mask"), ("seg", "mask"))
    assert (scan.keys[0], scan.keys[0].beside) == (b"000.png", (b"000.depth.png", b"000.seg.png"))


def test_dotted_names_in_folders_of_classes_are_no_fields(tmp_path: Path) -> None:
    files = [(f"{name}/2020.{day}.png", png(ids(day))) for name in ("cat", "dog") for day in range(2)]
    scan = source(tar(tmp_path / "a.tar", files)).scan()
    assert (len(scan.keys), scan.classes, scan.parts) == (4, ("cat", "dog"), (("image", "image"),))


def test_a_bad_mask_is_a_reject_that_names_its_member(tmp_path: Path) -> None:
    files = [(name, b"nothing" if name == "001.seg.png" else data) for name, data in samples(3)]
    raw = tar(tmp_path / "a.tar", files)
    report = run(raw, tmp_path / "out", Preprocess(crop=12), max_rejects=1)
    assert (report.samples, report.rejects) == (2, 1)
    (line,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert (line.key, line.message.partition(":")[0]) == ("001.png", "seg (001.seg.png)")


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def beside(records: list[Any], more: Callable[[int], dict[str, bytes]] = lambda i: {}) -> list[tuple[str, bytes]]:
    files = []
    for i, record in enumerate(records):
        members = {"png": png(np.zeros((16, 24, 3), np.uint8)), "json": json.dumps(record).encode(), **more(i)}
        files += [(f"{i:03}.{part}", data) for part, data in members.items()]
    return files


def test_lists_in_records_are_boxes_that_move_and_what_goes_with_them(tmp_path: Path) -> None:
    records = [
        {"boxes": [[8, 4, 12, 10], [0, 0, 4, 4]], "labels": ["cat", "dog"], "keypoints": [[9, 5, 2], [0, 0, 0]], "score": 0.5},
        {"boxes": [], "labels": [], "keypoints": [[12, 8, 1], [1, 1, 2]], "score": 1},
        {"boxes": [[8, 4, 12, 10]], "labels": ["dog"], "keypoints": [[12, 8, 1], [7, 3, 2]], "score": 1},
    ]
    raw = tar(tmp_path / "a.tar", beside(records))
    asked = {"keypoints": {"kind": "keypoints"}}
    report = run(raw, tmp_path / "out", Preprocess(crop=12, fields=asked))
    rows = rows_of(tmp_path / "out")
    assert set(report.fields) == {"image", "score", "keypoints", "boxes", "labels", "boxes_count"}
    assert rows["boxes"].tolist() == [[[2, 2, 6, 8], [0] * 4], [[0] * 4] * 2, [[2, 2, 6, 8], [0] * 4]]
    assert (rows["boxes_count"].tolist(), rows["labels"].tolist()) == ([1, 0, 1], [[0, -1], [-1, -1], [1, -1]])
    assert rows["keypoints"].tolist() == [[[3, 3, 2], [0, 0, 0]], [[6, 6, 1], [-5, -1, 0]], [[6, 6, 1], [1, 1, 2]]]
    assert verify(tmp_path / "out").ok


def test_records_that_hold_lists_alone_make_samples_of_images(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", beside([{"boxes": [[8, 4, 12, 10]], "labels": ["cat"]}, {"boxes": [], "labels": []}]))
    report = run(raw, tmp_path / "out")
    assert report.fields == ("image", "boxes", "labels", "boxes_count")
    rows = rows_of(tmp_path / "out")
    assert (rows["boxes"].tolist(), rows["boxes_count"].tolist()) == ([[[0, 0, 4, 6]], [[0] * 4]], [1, 0])  # cut to the centre of 8x8


def test_a_value_that_does_not_fit_is_a_reject(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", beside([{"boxes": [[1, 2, 3, 4]], "n": 1}, {"boxes": [[1, 2, 3]], "n": 300}, {"boxes": [], "n": 300}]))
    report = run(raw, tmp_path / "out", Preprocess(crop=12, fields={"n": {"dtype": "uint8"}}), max_rejects=2)
    assert (report.samples, report.rejects, report.reject_reasons) == (1, 2, {"value": 2})
    lines = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert [line.message for line in lines] == [
        "boxes: [1, 2, 3] is no box: a list of 4 numbers",
        "n: 300, and dtype=uint8 holds 0 to 255",
    ]


def test_arrays_beside_the_image_are_values(tmp_path: Path) -> None:
    emb, long = np.arange(6, dtype=np.float16).reshape(2, 3), np.zeros((100, 200))
    more = lambda i: {"emb.npy": npy(emb + i), "ids.npy": npy(np.arange(i)), "big.npy": npy(long), "caption.txt": b"a cat" * i, "txt": b"x"}  # noqa: E731
    raw = tar(tmp_path / "a.tar", beside([{"y": i} for i in range(1, 4)], lambda i: more(i + 1)))
    scan = source(raw).scan()
    assert {f.name: (f.dtype, f.shape) for f in scan.fields if f.name != "y"} == {
        "emb": ("float16", (2, 3)),
        "ids": ("int64", (3,)),
        "ids_count": ("int64", ()),
        "caption": ("uint8", (15,)),
    }
    assert np.array_equal(scan.values["emb"], [emb + i for i in range(1, 4)])
    assert scan.values["ids"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
    assert scan.values["caption"][0].tobytes().rstrip(b"\0") == b"a cat"
    assert any(line.startswith(".npy members big are left out: 160,000 bytes each: --field big:kind=image") for line in scan.warnings)
    assert scan.left_out == {"extension .txt": 3}
    scan = source(raw, fields={"txt": {"kind": "text"}, "big": {"kind": "image"}, "emb": {"dtype": "uint8"}}).scan()
    assert scan.parts == (("image", "image"), ("big", "image"))
    assert scan.values["txt"].tolist() == [[120]] * 3
    assert scan.values["emb"].dtype == np.uint8
    with pytest.raises(OptionError, match="--field deep: samples have no such field"):
        source(raw, fields={"deep": {"kind": "image"}}).scan()


@pytest.mark.parametrize("options", [{"label_column": "note"}, {"columns": "note"}, {"label_column": "note", "classes_from": "names.json"}])
def test_a_text_that_no_index_holds_is_an_error_before_anything_is_decoded(tmp_path: Path, options: dict[str, Any]) -> None:
    if named := options.get("classes_from"):
        (tmp_path / named).write_text(json.dumps(["cat", "dog", "z" * 400_000]))
        options = {**options, "classes_from": tmp_path / named}
    tar(tmp_path / "a.tar", beside([{"note": "cat"}, {"note": "dog" if named else "z" * 400_000}]))
    with pytest.raises(MMCompileError, match=r"(column note|field label) holds a text of 400,000 characters \('zzz"):
        run(Raw(tmp_path / "a.tar", **options), tmp_path / "out")
    assert not list((tmp_path / "out").glob("shards/*"))


def test_an_array_that_is_none_is_a_reject_and_other_shapes_are_told(tmp_path: Path) -> None:
    def made(*arrays: bytes, **more: Any) -> Any:
        return source(tar(tmp_path / "a.tar", beside([{}] * len(arrays), lambda i: {"emb.npy": arrays[i], "cls": b"0"})), **more).scan()

    scan = made(npy(np.zeros(2)), b"nothing", npy(np.array([{}], object)))
    assert scan.faults == dict.fromkeys((1, 2), "emb: no .npy file of numbers, or not all of it")
    scan = made(npy(np.zeros((2, 2))), npy(np.zeros((2, 3))))
    assert any(line.startswith(".npy members emb are left out: they differ: float64 (2, 2), and float64 (2, 3) in 001.png") for line in scan.warnings)
    scan = made(npy(np.zeros((2, 2))), npy(np.zeros((2, 3))), fields={"emb": {"shape": (2, 2)}})
    assert scan.faults == {1: "emb: an array of shape (2, 3), expected (2, 2)"}


def test_folders_side_by_side_in_a_zip_are_no_classes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(4):
            archive.writestr(f"data/images/{i}.png", png(ids(i)))
            archive.writestr(f"data/masks/{i}.png", png(ids(i)))
    with pytest.raises(SourceError, match=r"masks holds what belongs to the pictures in .*images, which is read of a folder: unpack"):
        source(tmp_path / "a.zip").scan()
    assert source(tmp_path / "a.zip", split=("all=data",)).scan().classes == ("images", "masks")
