"""What a person may have meant otherwise is said by a build: files beside images, crops and shards of a strange size, masks that are left out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile import MMapShardDataset, Raw, RowPreprocess
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.summary import build_lines
from tests.compiler.builds import ROW_BYTES, SMALL, dataset, inline, make_raw, picture, run, write
from tests.compiler.test_archive import tar


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


def turned(seed: int, size: tuple[int, int]) -> bytes:
    """A picture that is stored on its side: (width, height) as stored."""
    image = Image.open(io.BytesIO(picture(seed, size=size)))
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    image.save(out, "PNG", exif=exif)
    return out.getvalue()


# ---------------------------------------------------------------- files beside images


@pytest.mark.parametrize("suffix", ["txt", "json", "cls", "xml"])
@pytest.mark.parametrize("folder", ["", "cat/"])
def test_texts_beside_images_under_their_names_are_told_of_with_what_reads_them(tmp_path: Path, suffix: str, folder: str) -> None:
    raw = write(tmp_path / "raw", {f"{folder}{i}.png": picture(i) for i in range(30)})
    write(raw, {f"{folder}0.{suffix}": b"a cat"})
    (line,) = FolderSource(str(raw)).scan().warnings
    assert line.startswith(f"{folder}0.{suffix} and others beside the image of the same name are left out; ")
    assert ("--field" if suffix == "txt" else "list" if suffix == "xml" else "tar") in line


def test_texts_beside_images_of_several_folders_are_told_of(tmp_path: Path) -> None:
    write(tmp_path, {"a/0.png": picture(0), "b/0.png": picture(1), "b/0.txt": b"a dog"})
    found = open_source([str(tmp_path / "a"), str(tmp_path / "b")], SourceOptions()).scan()
    assert any(line.startswith("1/0.txt and others beside the image of the same name are left out; ") for line in found.warnings)


def test_other_texts_are_counted_alone(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"0.png": picture(0), "README.txt": b"", "LICENSE.txt": b""})
    found = FolderSource(str(raw)).scan()
    assert (found.warnings, found.left_out) == ((), {"extension .txt": 2})


def test_what_the_line_about_captions_advises_works(tmp_path: Path) -> None:
    texts = [f"picture {i}" for i in range(4)]
    write(tmp_path, {f"{i}.png": picture(i) for i in range(4)})
    (tmp_path / "list.csv").write_text("file_name,caption\n" + "".join(f"{i}.png,{text}\n" for i, text in enumerate(texts)))
    members = [pair for i, text in enumerate(texts) for pair in ((f"{i}.png", picture(i)), (f"{i}.txt", text.encode()))]
    tar(tmp_path / "raw.tar", members)
    for source, name in (("list.csv", "caption"), ("raw.tar", "txt")):
        out = tmp_path / f"{name}-out"
        build(Raw(str(tmp_path / source)), out, preprocess=Preprocess(crop=8, fields={name: {"kind": "text"}}), options=BuildOptions(workers=1))
        ds = MMapShardDataset(out, output="dict")
        assert [ds[i][name] for i in range(4)] == texts


# ---------------------------------------------------------------- pictures smaller than the crop


def test_pictures_that_are_smaller_than_the_crop_are_counted_however_they_were_made(tmp_path: Path) -> None:
    files = {"a.png": (10, 12), "b.png": (8, 12), "c.png": (9, 12), "d.png": (20, 20)}
    raw = write(tmp_path / "raw", {name: picture(i, size=size) for i, (name, size) in enumerate(files.items())})
    write(raw, {"e.png": turned(9, (30, 9)), "f.png": turned(10, (9, 30))})
    preprocess = Preprocess(crop=(10, 9))
    first = run(raw, tmp_path / "out", preprocess)
    assert first.counts["images smaller than --crop 10x9, with black around them"] == 2
    again = run(raw, tmp_path / "out", preprocess)
    assert (again.kept, again.counts) == (6, first.counts)
    bytes_before = dataset(tmp_path / "out")
    write(raw, {"g.png": picture(11, size=(3, 3))})
    more = run(raw, tmp_path / "out", preprocess)
    assert more.decoded == 1
    assert more.counts["images smaller than --crop 10x9, with black around them"] == 3
    assert bytes_before.keys() != dataset(tmp_path / "out").keys()
    ignored = run(raw, tmp_path / "ignored", Preprocess(crop=(10, 9), orientation="ignore"))
    assert ignored.counts["images smaller than --crop 10x9, with black around them"] == 3
    assert any("3 images smaller than --crop 10x9, with black around them" in line for line in build_lines(more))


@pytest.mark.parametrize("preprocess", [Preprocess(crop=8), Preprocess(resize=20, crop=16), Preprocess(pad=30), Preprocess(crop=40, views=2)])
def test_nothing_is_said_where_nothing_is_filled_by_a_crop(tmp_path: Path, preprocess: Preprocess) -> None:
    report = run(make_raw(tmp_path / "raw"), tmp_path / "out", preprocess)
    assert not [line for line in report.counts if "smaller" in line]


# ---------------------------------------------------------------- sizes of shards


def test_shards_smaller_than_a_sample_are_said(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    said = f"--shard-bytes 1 is less than a sample takes ({ROW_BYTES:,} bytes), so a shard holds one or two; 256M is usual"
    for shard_bytes, lines in ((1, [said]), (ROW_BYTES - 1, [said.replace("1 is", f"{ROW_BYTES - 1} is")]), (ROW_BYTES, []), (1 << 28, [])):
        options = BuildOptions(workers=1, shard_bytes=shard_bytes)
        report = build(raw, tmp_path / f"out{shard_bytes}", preprocess=SMALL, options=options)
        assert [line for line in report.warnings if "shard" in line] == lines


def test_shards_smaller_than_a_row_of_numbers_are_said(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 4), np.float32))
    report = build(tmp_path / "x.npy", tmp_path / "out", preprocess=RowPreprocess(), options=BuildOptions(workers=1, shard_bytes=7))
    said = "--shard-bytes 7 is less than a sample takes (16 bytes), so a shard holds one or two; 256M is usual"
    assert report.warnings == (said,)


# ---------------------------------------------------------------- columns


def listed(root: Path) -> str:
    for i in range(4):
        write(root, {f"{i}.png": picture(i), f"m{i}.png": picture(i, mode="L"), f"r{i}.png": picture(i)})
    rows = [f'{i}.png,m{i}.png,r{i}.png,"[[0, 0, 4, 4]]",{i}\n' for i in range(4)]
    (root / "list.csv").write_text("file_name,mask,right,boxes,age\n" + "".join(rows))
    return str(root / "list.csv")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (None, []),
        (("age", "mask"), ["left out, as --columns does not name them: right (image), boxes (boxes)"]),
        (("age", "mask", "right", "boxes"), []),
        ((), []),
    ],
)
def test_pixels_and_boxes_of_a_list_that_columns_leaves_out_are_named(tmp_path: Path, columns: Any, said: list[str]) -> None:
    raw = Raw(listed(tmp_path), columns=columns)
    report = build(raw, tmp_path / "out", preprocess=SMALL, options=BuildOptions(workers=1))
    assert [line for line in report.warnings if "left out" in line] == said


def test_masks_of_an_archive_that_columns_leaves_out_are_named(tmp_path: Path) -> None:
    members = []
    for i in range(4):
        members += [(f"{i}.png", picture(i)), (f"{i}.seg.png", picture(i, mode="L")), (f"{i}.json", b'{"score": 1, "age": 2}')]
    tar(tmp_path / "raw.tar", members)
    for columns, said in ((("score",), ["left out, as --columns does not name them: seg (mask)"]), (("score", "seg"), []), (None, [])):
        raw = Raw(str(tmp_path / "raw.tar"), columns=columns)
        report = build(raw, tmp_path / f"out{columns}", preprocess=SMALL, options=BuildOptions(workers=1))
        assert [line for line in report.warnings if "left out" in line] == said
