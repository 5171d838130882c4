"""What a page says of datasets of every kind: names are text, whatever is in them; all that a sample holds is there."""

from __future__ import annotations

import base64
import io
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.errors import CorruptShardError, OptionError
from mmcompile.format.canonical import canonical
from mmcompile.format.index import load_index, publish
from mmcompile.format.npy import save_blob
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import Reject
from mmcompile.report import Replay, rejects, write_report
from mmcompile.runtime.augment import Augment
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.loader import ShardLoader
from tests.compiler import builds
from tests.format.builders import file_of
from tests.report import culprits
from tests.report.test_write import Page
from tests.support import SCENE_FACTS, draw_scenes, make_dataset, make_scenes
from tests.test_cli import run

RNG = np.random.default_rng(0)
EVIL = ("<script>alert(1)</script>", "a&b\"c'd", "\udcff\udcfe", "x\u202ey\n\x1b[31m")


def page(out: Path, tmp_path: Path, **more: Any) -> Page:
    write_report(out, tmp_path / "page.html", **more)
    return Page(tmp_path / "page.html")


def test_names_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    keys = [os.fsencode(f"{name}/<img src=x onerror=alert(1)>{i}.png") for i, name in enumerate(EVIL)]
    images = RNG.integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
    settings = {"source": {"kind": "<b>bold</b>", "</style>": "x"}, "<i>": 1}
    make_dataset(tmp_path / "<u>out", images, range(4), classes=EVIL, keys=keys, settings=settings, splits={"<p>\x1b": 2, "val": 2})
    shown = page(tmp_path / "<u>out", tmp_path)
    tags = {tag for tag, _ in shown.tags}
    assert not tags & {"script", "u", "object", "iframe"}
    assert len(shown.found("img")) == 4
    assert all(set(attrs) <= {"src", "alt", "width", "height", "class", "title"} for attrs in shown.found("img"))
    for text in ("<script>alert(1)</script>", "a&b\"c'd", "\\xff\\xfe", "x\\u202ey\\n\\x1b[31m", "<img src=x onerror=alert(1)>0.png", "<b>bold</b>"):
        assert text in shown.text
    assert not {c for c in shown.source if ord(c) < 32 and c != "\n"} | ({"\u202e"} & set(shown.source))


def test_counts_of_classes_are_told_for_each_split(tmp_path: Path) -> None:
    labels = [0] * 5 + [1] * 2 + [0] * 3
    make_dataset(tmp_path / "out", np.zeros((10, 1, 4, 4), np.uint8), labels, classes=("cat", "dog", "emu"), splits={"train": 7, "val": 3})
    text = page(tmp_path / "out", tmp_path).text
    assert "3 classes, from 0 to 8 samples" in text
    assert "1 class without a sample" in text
    assert "val has no sample of 1 class: dog" in text
    assert "cat53" in text.replace("\n", "")


def test_labels_without_names_are_counted_by_number(tmp_path: Path) -> None:
    values = {"label": np.array([7, 7, 300, 7, 2]), "x": np.zeros((5, 2), np.float32)}
    make_dataset(tmp_path / "out", values=values, facts={"label": {"meaning": "class"}}, splits={"train": 3, "val": 2}, keyed=False)
    text = page(tmp_path / "out", tmp_path).text
    assert "3 classes, from 1 to 3 samples" in text
    assert "label 721" in text
    assert "val has no sample of 1 class: label 300" in text


def test_a_thousand_classes_stay_readable_and_are_all_there(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(1000), np.arange(1000) % 3 + 1)
    classes = tuple(f"kind {c}" for c in range(1000))
    make_dataset(tmp_path / "out", np.zeros((len(labels), 1, 2, 2), np.uint8), labels, classes=())
    blob = save_blob(tmp_path / "out" / "shards", "classes", [canonical(list(classes))], tmp_path / "out" / "shards", ".json")
    publish(tmp_path / "out", replace(load_index(tmp_path / "out")[0], classes=None, classes_file=blob))
    shown = page(tmp_path / "out", tmp_path)
    assert "all 1,000 classes" in shown.text
    assert len(shown.found("figure")) == 72
    assert all(f"kind {c}" in shown.text for c in range(1000))


def test_masks_boxes_points_and_texts_are_shown(tmp_path: Path) -> None:
    scenes = draw_scenes(4)
    make_scenes(tmp_path / "out", scenes)
    shown = page(tmp_path / "out", tmp_path)
    assert len(shown.found("img")) == 8
    assert "image of sample 0" in shown.found("img")[0]["alt"]
    assert "Körper" in shown.text
    assert "left out" not in shown.text
    facts = {"mask": {**SCENE_FACTS["mask"], "categories": ("sky", *(f"thing {k}" for k in range(1, 6)))}}
    make_scenes(tmp_path / "named", scenes, facts)
    assert "2 thing 2" in page(tmp_path / "named", tmp_path).text


def test_rows_of_numbers_are_a_table(tmp_path: Path) -> None:
    values = {"x": np.arange(24, dtype=np.float64).reshape(8, 3) / 7, "day": np.arange(8, dtype=np.int64), "kind": np.arange(8) % 2 - 1}
    facts = {"x": {"columns": ("<low>", "mid", "high")}, "day": {"unit": "D"}, "kind": {"categories": ("even", "odd")}}
    make_dataset(tmp_path / "out", values=values, facts=facts, keyed=False)
    shown = page(tmp_path / "out", tmp_path)
    for text in ("x.<low>", "1970-01-08", "even", "none", "0.1429"):
        assert text in shown.text
    assert not shown.found("img")


def test_arrays_are_lines_and_strips(tmp_path: Path) -> None:
    values = {"wave": RNG.normal(size=(3, 500)).astype(np.float32), "map": RNG.normal(size=(3, 20, 30)), "cube": np.zeros((3, 4, 5, 6), np.int16)}
    make_dataset(tmp_path / "out", values=values)
    shown = page(tmp_path / "out", tmp_path)
    assert len(shown.found("img")) == 6
    assert sum("line" in (attrs.get("class") or "") for attrs in shown.found("svg")) == 3
    assert shown.text.count("of 4 x 5 x 6 plane 2") == 3


def test_numbers_stand_beside_their_units(tmp_path: Path) -> None:
    raw = builds.make_raw(tmp_path / "raw", per_class=2)
    for name, dtype, above, below in (
        ("bytes", "uint8", "from 0 to 1: pixels / 255; what --mean and --std take", "as stored, uint8, where 255 is 1 above"),
        ("floats", "float32", "from 0 to 1: pixels / 255", "as stored, float32, normalised: (number above - mean) / std"),
        ("counts", "uint8", "as pixels of the sources count", "as stored, uint8"),
    ):
        more = ("--scale", "none") if name == "counts" else ("--normalize", "imagenet")
        assert run("build", str(raw), str(tmp_path / name), "--dtype", dtype, *more, "--workers", "1").exit_code == 0
        text = page(tmp_path / name, tmp_path).text
        assert above in text
        assert below in text
        assert "allred" in text
        assert ("is 1 above" in text) == (name == "bytes")


def test_more_numbers_than_have_a_histogram_are_counted(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", values={"x": RNG.normal(size=(4, 60))}, keyed=False)
    assert "The first 24 of 60 numbers." in page(tmp_path / "out", tmp_path).text


@pytest.mark.parametrize("count", [0, 1])
def test_no_samples_and_one_are_pages_too(tmp_path: Path, count: int) -> None:
    make_dataset(tmp_path / "out", np.zeros((count, 3, 8, 8), np.uint8), [0] * count, classes=("a",))
    shown = page(tmp_path / "out", tmp_path)
    assert len(shown.found("figure")) == count
    assert ("holds no samples" if not count else "The 1 sample.") in shown.text


def test_without_images_there_is_no_picture_and_all_else(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", RNG.integers(0, 256, (4, 3, 8, 8), dtype=np.uint8), [0, 1, 0, 1])
    result = run("report", str(tmp_path / "out"), "--no-images", "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    shown = Page(tmp_path / "page.html")
    assert not shown.found("img")
    assert "class 1" in shown.text
    make_dataset(tmp_path / "maps", values={"map": np.zeros((2, 20, 30))})
    assert not page(tmp_path / "maps", tmp_path, images=False).found("img")
    with pytest.raises(OptionError, match=r"--no-images with -o .*pictures: a folder of pictures; name a page"):
        write_report(tmp_path / "out", tmp_path / "pictures", rows=[0], images=False)
    assert not (tmp_path / "pictures").exists()
    write_report(tmp_path / "out", tmp_path / "rows.html", rows=[0], images=False)
    assert not Page(tmp_path / "rows.html").found("img")


def test_rejects_are_told_and_shown_as_far_as_they_decode(tmp_path: Path) -> None:
    raw = builds.make_raw(tmp_path / "raw", per_class=2)
    photo = Image.fromarray(np.repeat(np.repeat(RNG.integers(0, 256, (30, 40, 3), dtype=np.uint8), 8, 0), 8, 1))
    photo.save(tmp_path / "whole.jpg", quality=90)
    cut = (tmp_path / "whole.jpg").read_bytes()
    Image.fromarray(np.arange(6400, dtype=np.uint16).reshape(80, 80) * 10).save(tmp_path / "deep.png")
    builds.write(
        raw, {"dog/deep.png": (tmp_path / "deep.png").read_bytes(), "cat/broken.png": builds.BROKEN, "dog/cut.jpg": cut[: len(cut) * 2 // 3]}
    )
    builds.run(raw, tmp_path / "out", max_rejects=5)
    before = builds.snapshot(raw)
    shown = page(tmp_path / "out", tmp_path, raw=raw)
    assert builds.snapshot(raw) == before
    assert [attrs["alt"] for attrs in shown.found("img")][4:] == ["what decodes of dog/cut.jpg", "what decodes of dog/deep.png"]
    assert "cat/broken.png" in shown.text
    assert "--raw" not in shown.text
    assert "With `--raw RAW`" in page(tmp_path / "out", tmp_path).text
    assert "--raw" not in page(tmp_path / "out", tmp_path, images=False).text
    assert "Nothing can be seen of them" not in page(tmp_path / "out", tmp_path, images=False, raw=raw).text
    for name in ("cut.jpg", "deep.png"):
        (raw / "dog" / name).write_bytes(cut)  # no longer what was rejected
    changed = page(tmp_path / "out", tmp_path, raw=raw)
    assert len(changed.found("img")) == 4
    assert "Nothing can be seen of them; the table says why." in changed.text
    assert changed.text.count("it has changed since") == 2


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "parquet"])
def test_rejects_are_shown_wherever_they_lie_and_whatever_their_depth(tmp_path: Path, kind: str) -> None:
    floats = np.linspace(-3, 900, 80 * 60, dtype=np.float32).reshape(60, 80)
    Image.fromarray(floats).save(tmp_path / "float.tif")
    Image.fromarray(np.arange(6400, dtype=np.uint16).reshape(80, 80) % 500).save(tmp_path / "deep.png")
    named = {f"a/{i}.png": builds.picture(i) for i in range(3)}
    named |= {"a/deep.png": (tmp_path / "deep.png").read_bytes(), "a/float.tif": (tmp_path / "float.tif").read_bytes(), "a/broken.png": builds.BROKEN}
    raw = tmp_path / f"raw.{kind}"
    if kind == "folder":
        builds.write(raw, named)
    elif kind == "zip":
        with zipfile.ZipFile(raw, "w") as archive:
            for name, data in named.items():
                archive.writestr(name, data)
    elif kind == "tar":
        with tarfile.open(raw, "w") as archive:
            for name, data in named.items():
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
    else:
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").table({"image": [{"bytes": data, "path": name} for name, data in named.items()], "label": [0] * 6}), raw
        )
    assert run("build", str(raw), str(tmp_path / "out"), "--max-rejects", "3", "--workers", "1").exit_code == 0
    result = run("report", str(tmp_path / "out"), "--raw", str(raw), "-o", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.stderr
    shown = Page(tmp_path / "page.html")
    drawn = [attrs for attrs in shown.found("img") if attrs["alt"].startswith("what decodes of")]
    assert len(drawn) == 2
    for attrs in drawn:  # put between black and white, whatever their range
        with Image.open(io.BytesIO(base64.b64decode(attrs["src"].partition(",")[2]))) as image:
            pixels = np.asarray(image)
        assert (pixels.min(), pixels.max()) == (0, 255)
    assert shown.text.count("above") >= 2
    assert "nothing of it decodes" in shown.text


def test_settings_of_a_stranger_open_no_other_place(tmp_path: Path) -> None:
    builds.write(tmp_path, {"private/x.png": builds.picture(1), "raw/list.csv": b"image,label\nx.png,0\n"})
    listed = [Reject("x.png", len(builds.picture(1)), None, "load", "not-an-image", None, "")]
    settings = {"kind": "manifest", "images": str(tmp_path / "private")}
    assert rejects.thumbnails(listed, tmp_path / "raw" / "list.csv", settings) == {"x.png": "not found in RAW"}
    assert rejects.thumbnails(listed, tmp_path / "raw", {"kind": "dataset"}) == {"x.png": "not found in RAW"}


def test_more_rejects_than_are_tried_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejects, "_MOST", 1)
    builds.write(tmp_path, {"a.png": builds.picture(1), "b.png": builds.picture(2)})
    seen = rejects.thumbnails([Reject(name, None, None, "load", "x", None, "") for name in ("a.png", "b.png")], tmp_path, {})
    assert isinstance(seen["a.png"], np.ndarray)
    assert seen["b.png"] == "only the first 1 are tried"


def test_a_build_that_rejects_stopped_names_them_and_what_allows_them(tmp_path: Path) -> None:
    raw, out = builds.make_raw(tmp_path / "raw", per_class=2), tmp_path / "out"
    builds.write(raw, {f"cat/{name}.png": builds.BROKEN for name in "abcdef"})
    result = run("build", str(raw), str(out))
    assert result.exit_code == 1
    assert "  cat/e.png: " in result.stderr
    assert "\n  and more\n" in result.stderr
    (raw / "cat" / "f.png").unlink()
    assert "and more" not in run("build", str(raw), str(out)).stderr
    listed = out / ".build" / "rejects.jsonl"
    said = run("report", str(out), "-o", str(tmp_path / "p.html")).stderr
    assert f"images were rejected (each with its reason in {listed}), and --max-rejects allows them" in said
    listed.write_bytes(b"")
    assert "rejected" not in run("report", str(out), "-o", str(tmp_path / "p.html")).stderr


def test_a_page_of_a_split_says_what_is_of_it(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", RNG.integers(0, 256, (4, 3, 8, 8), dtype=np.uint8), [0, 1, 0, 1], splits={"train": 3, "val": 1}, shards=(3, 1))
    text = page(tmp_path / "out", tmp_path, split="val").text
    assert "split val; rejects, repeats and storage are of the whole dataset" in text
    assert "1sample in val, of 4" in text
    assert "1of 2 classes" in text
    assert "0rejects, all splits" in text
    assert "trainimage" not in text
    whole = page(tmp_path / "out", tmp_path, split="all").text
    assert "4samples: train 3, val 1" in whole
    assert "rejects, all splits" not in whole


def test_a_reject_that_crashes_or_hangs_its_decoder_costs_its_picture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejects, "thumbnail", culprits.thumbnail)
    monkeypatch.setattr(rejects, "_LIMIT_S", 2.0)
    names = ("crash", "hang", "fine", "again")
    builds.write(tmp_path, dict.fromkeys(names, b"x"))
    listed = [Reject(name, 1, None, "load", "decoder-crash" if name == "again" else "truncated", None, "") for name in (*names, "gone", "\0")]
    found = rejects.thumbnails(listed, tmp_path, {})
    assert [key for key, seen in found.items() if not isinstance(seen, str)] == ["fine"]
    assert {key: seen for key, seen in found.items() if isinstance(seen, str)} == {
        **dict.fromkeys(("crash", "hang"), "its decoder crashed, or took too long"),
        "again": "it crashes its decoder",
        **dict.fromkeys(("gone", "\0"), "not found in RAW"),
    }


@pytest.mark.parametrize("normalize", [None, ((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_a_replay_shows_what_the_loader_gives(tmp_path: Path, layout: str, normalize: Any) -> None:
    images = RNG.integers(0, 256, (12, 3, 16, 20), dtype=np.uint8)
    make_dataset(tmp_path / "out", images, [0] * 12, layout=layout, normalize=normalize, splits={"train": 5, "val": 7})
    words = ["--rows", "3", "--split", "val", "--replay", "4:2", "--augment", "crop=8x12,hflip=0.5", "-o", str(tmp_path / "pics")]
    result = run("report", str(tmp_path / "out"), *words)
    assert result.exit_code == 0, result.stderr
    dataset = MMapShardDataset(tmp_path / "out", "val", dtype="uint8")
    loader = ShardLoader(dataset, 7, seed=4, augment=Augment(crop=(8, 12), hflip=0.5))
    loader.set_epoch(2)
    (batch,) = list(loader)
    with Image.open(tmp_path / "pics" / "row-3-image-seed-4-epoch-2.png") as image:
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), batch[0][3].numpy())
    with Image.open(tmp_path / "pics" / "row-3-image.png") as image:
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), images[8])


def test_a_replay_moves_all_that_belongs_to_a_picture(tmp_path: Path) -> None:
    make_scenes(tmp_path / "out", draw_scenes(3))
    made = write_report(tmp_path / "out", tmp_path / "pics", rows=[1], replay=Replay(0, 3, Augment(crop=(32, 40), hflip=0.5)))
    assert [Path(name).name for name in made.files] == [
        *("row-1-image.png", "row-1-mask.png"),
        *("row-1-image-seed-0-epoch-3.png", "row-1-mask-seed-0-epoch-3.png"),
    ]
    with Image.open(tmp_path / "pics" / "row-1-mask-seed-0-epoch-3.png") as image:
        assert image.size == (40, 32)
    shown = page(tmp_path / "out", tmp_path, rows=[1], replay=Replay(0, 3, Augment(resized_crop=24)))
    assert "image, replayed" in shown.text
    assert "epoch 3 of seed 0" in shown.text


def test_a_replay_of_variants_shows_the_one_of_that_epoch(tmp_path: Path) -> None:
    stored = RNG.integers(0, 256, (4, 3, 3, 8, 8), dtype=np.uint8)
    facts = {"image": {"meaning": "image", "layout": "chw", "scale": 255.0, "views": 3}}
    make_dataset(tmp_path / "out", values={"number": np.arange(4), "image": stored}, facts=facts)
    dataset = MMapShardDataset(tmp_path / "out")
    for epoch in range(3):
        write_report(tmp_path / "out", tmp_path / "pics", rows=[2], replay=Replay(5, epoch))
        loader = ShardLoader(dataset, 4, seed=5, num_workers=0)
        loader.set_epoch(epoch)
        (batch,) = list(loader)
        with Image.open(tmp_path / "pics" / f"row-2-image-seed-5-epoch-{epoch}.png") as image:
            assert np.array_equal(np.asarray(image).transpose(2, 0, 1), batch[1][2].numpy())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--augment", "crop=4"], "add --replay"),
        (["--replay", "0:1"], "say what does"),
        (["--replay", "0"], "two whole numbers"),
        (["--replay", "0:0", "--augment", "crop=99"], "larger than"),
        (["--replay", "0:0", "--augment", "crop=4,resized_crop=4"], "exclude each other"),
        (["--replay", "0:0", "--augment", "blur=4"], "crop=N"),
        (["--split", "test"], "has no splits: leave --split out"),
        (["--raw", "nowhere"], "there is no such folder or file"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    make_dataset(tmp_path / "out", np.zeros((3, 3, 8, 8), np.uint8))
    result = run("report", str(tmp_path / "out"), "-o", str(tmp_path / "p.html"), *words)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr
    assert not (tmp_path / "p.html").exists()


def test_leaks_and_two_labels_stand_out(tmp_path: Path) -> None:
    raw = builds.make_raw(tmp_path / "raw", per_class=2)
    builds.write(raw, {"dog/same.png": (raw / "cat" / "0.png").read_bytes()})
    builds.run(raw, tmp_path / "out")
    text = page(tmp_path / "out", tmp_path).text
    assert "2 samples with the same bytes as others under another label" in text
    assert "dog/same.png" in text


def test_a_cut_shard_is_an_error_that_names_it_and_no_page(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", RNG.integers(0, 256, (6, 3, 8, 8), dtype=np.uint8), shards=(3, 3))
    damaged = file_of(tmp_path / "out", "image", 1)
    os.truncate(damaged, damaged.stat().st_size - 10)
    with pytest.raises(CorruptShardError, match=damaged.name):
        write_report(tmp_path / "out", tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


def test_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="disk"):
        write_report("s3://bucket/out", tmp_path / "p.html")


def test_a_dataset_of_another_place_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path / "data", np.zeros((2, 3, 8, 8), np.uint8))
    monkeypatch.chdir(tmp_path / "data")
    result = run("report", ".", "-o", "../p.html")
    assert result.exit_code == 0
    assert "<h1>data</h1>" in (tmp_path / "p.html").read_text()
    assert run("report", ".").exit_code == 2  # the default would lie in the dataset


def test_of_many_rows_few_are_read_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = 30_000, np.arange(30_000) % 50
    make_dataset(tmp_path / "out", np.zeros((rows, 3, 2, 2), np.uint8), labels, shards=(100,) * 300)
    read: list[int] = []
    gather = Reader.gather

    def counted(self: Reader, field: str, asked: Any, *more: Any) -> Any:
        read.append(len(asked) if field == "image" else 0)
        return gather(self, field, asked, *more)

    monkeypatch.setattr(Reader, "gather", counted)
    made = write_report(tmp_path / "out", tmp_path / "page.html")
    assert len(made.rows) == 50
    assert sum(read) <= 4096 + 72
    text = Page(tmp_path / "page.html").text
    assert "30,000 sources" in text
    assert "50 classes, of 600 samples each" in text


def test_numbers_whose_mean_is_beyond_all_numbers_have_a_page(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", None, [0, 0, 0], values={"x": np.array([[1.7e308], [1.7e308], [-1.7e308]])})
    assert "1.7e+308" in page(tmp_path / "out", tmp_path).text


def test_a_reject_whose_name_leads_out_of_raw_is_not_read(tmp_path: Path) -> None:
    """As that of a stranger's dataset may, to have a picture of somebody else's in a page."""
    builds.write(tmp_path, {"private.png": builds.picture(1), "raw/in.png": builds.picture(2)})
    names = ("in.png", "../private.png", str(tmp_path / "private.png"))
    listed = [Reject(name, None, None, "load", "not-an-image", None, "") for name in names]
    seen = rejects.thumbnails(listed, tmp_path / "raw", {})
    assert [isinstance(seen[name], str) for name in names] == [False, True, True]


def test_a_replay_of_damaged_text_blames_the_file_and_not_the_augmentation(tmp_path: Path) -> None:
    text = np.full((3, 4), 0xFF, np.uint8)
    make_dataset(tmp_path / "out", np.zeros((3, 3, 8, 8), np.uint8), [0] * 3, values={"t": text}, facts={"t": {"meaning": "text"}})
    with pytest.raises(CorruptShardError, match="field 't' holds bytes that are no UTF-8"):
        write_report(tmp_path / "out", tmp_path / "page.html", rows=[0], replay=Replay(0, 0, Augment(crop=4)))


def test_a_frame_that_memory_has_no_room_for_is_one_line(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", np.zeros((3, 3, 8, 8), np.uint8), [0] * 3)
    with pytest.raises(OptionError, match="--augment: takes more memory than there is"):
        write_report(tmp_path / "out", tmp_path / "page.html", rows=[0], replay=Replay(0, 0, Augment(crop=8, padding=999_999_999)))
