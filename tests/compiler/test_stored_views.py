"""Stored variants: what they show, that all of a sample shows the same, and that a row is that of its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmcompile
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.views import Views
from mmcompile.errors import OptionError
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import SMALL, age, dataset, inline, make_raw, picture, run, write
from tests.compiler.test_many_fields import make, rows_of

VIEWS = Preprocess(crop=8, views={"count": 3, "hflip": 0.5}, resampler="pillow")


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "workers" not in request.node.name:
        inline(monkeypatch)


def test_each_view_is_the_part_that_is_drawn_for_it(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 4)
    run(raw, tmp_path / "out", VIEWS)
    field = Reader(tmp_path / "out").index.fields[0]
    assert (field.shape, field.views, field.sample_shape) == ((3, 3, 8, 8), 3, (3, 8, 8))
    rows, views = rows_of(tmp_path / "out")["image"], VIEWS.drawn
    assert views is not None
    for key, row in zip(FolderSource(str(raw)).scan().keys, rows, strict=True):
        image = Image.open(raw / key.decode()).convert("RGB")
        shown = views.shown(key, image.height, image.width)
        for part, view in zip(shown, row, strict=True):
            box = (part.left, part.top, part.left + part.width, part.top + part.height)
            wanted = np.asarray(image.crop(box).resize((8, 8), Image.Resampling.BILINEAR))
            assert np.array_equal(view.transpose(1, 2, 0), wanted[:, ::-1] if part.flip else wanted)
    assert verify(tmp_path / "out").ok


def test_draws_are_of_seed_key_and_number_alone() -> None:
    views = Views(count=4, hflip=0.5)
    assert views.shown(b"a", 30, 40) == views.shown(b"a", 30, 40)
    assert views.shown(b"a", 30, 40)[:2] == Views(count=2, hflip=0.5).shown(b"a", 30, 40)
    assert len({*views.shown(b"a", 300, 400), *views.shown(b"b", 300, 400), *Views(count=4, hflip=0.5, seed=1).shown(b"a", 300, 400)}) == 12
    for part in Views(count=500, scale=(0.2, 0.5), ratio=(1.0, 2.0)).shown(b"x", 100, 120):
        assert 0 <= part.top <= 100 - part.height
        assert 0 <= part.left <= 120 - part.width
        assert 0.19 <= part.height * part.width / 12_000 <= 0.51
        assert 0.95 <= part.width / part.height <= 2.05
        assert not part.flip
    assert {part.flip for part in Views(count=100, hflip=0.5).shown(b"x", 9, 9)} == {False, True}


def test_masks_and_boxes_show_what_their_picture_shows(tmp_path: Path) -> None:
    source = make(tmp_path / "raw", 6, lambda i: (1, 6, 3)[i % 3])
    asked = Preprocess(crop=(16, 16), filter="nearest", views={"count": 5, "scale": (0.3, 1.0), "hflip": 0.5})
    run(source, tmp_path / "out", asked)
    rows = rows_of(tmp_path / "out")
    assert rows["boxes"].shape == (6, 5, 3, 4)
    assert rows["labels"].shape == (6, 5, 3)
    assert rows["boxes_count"].shape == (6, 5)
    seen = 0
    for image, ids, boxes, count in zip(*(rows[n].reshape(-1, *rows[n].shape[2:]) for n in ("image", "mask", "boxes", "boxes_count")), strict=True):
        there = image[0] == 200
        assert np.array_equal(ids == 255, there)
        if not there.any():
            assert count == 0 or np.prod(boxes[0, 2:] - boxes[0, :2]) < 4
            continue
        ys, xs = np.nonzero(there)
        assert count == 1
        assert np.abs(boxes[0] - [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]).max() <= 1.01
        seen += 1
    assert seen > 15
    again = run(source, tmp_path / "out", asked)
    assert (again.decoded, again.copied) == (0, 0)


def test_a_renamed_file_has_other_views_and_the_rest_is_copied(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 5)
    age(raw)
    run(raw, tmp_path / "out", VIEWS)
    write(raw, {"cat/new.png": picture(77), "cat/9.png": (raw / "cat" / "0.png").read_bytes()})
    (raw / "dog" / "0.png").rename(raw / "dog" / "zero.png")
    report = run(raw, tmp_path / "out", VIEWS)
    run(raw, tmp_path / "clean", VIEWS)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")
    assert report.decoded == 3
    assert report.copied + report.kept == 9


def test_rows_of_views_are_copied_whatever_their_keys_look_like(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 3)
    run(raw, tmp_path / "out", VIEWS)
    report = run(raw, tmp_path / "out", VIEWS, options={"keys": "hash"})
    assert (report.decoded, report.copied) == (0, 6)
    run(make_raw(tmp_path / "more", 3, seed=50), tmp_path / "other", VIEWS)
    report = mmcompile.build([tmp_path / "out", tmp_path / "other"], tmp_path / "merged")
    assert report.samples == 12
    both = [rows_of(tmp_path / name)["image"][row] for row in (0, 3) for name in ("out", "other")]
    assert all(any(np.array_equal(row, mine) for mine in rows_of(tmp_path / "merged")["image"]) for row in both)


def test_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 6)
    run(raw, tmp_path / "one", VIEWS)
    run(raw, tmp_path / "two", VIEWS, workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")


def test_statistics_are_those_of_all_views(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 3)
    run(raw, tmp_path / "out", Preprocess(crop=8, views=4, normalize="auto"))
    index = Reader(tmp_path / "out").index
    rows = rows_of(tmp_path / "out")["image"].astype(np.float64) / 255
    assert np.allclose(index.statistics["all"]["image"]["mean"], rows.mean((0, 1, 3, 4)), rtol=1e-12)
    assert index.statistics["all"]["image"]["pixels"] == 6 * 4 * 64


def test_a_reader_hands_out_every_view_in_as_many_epochs(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw", 3)
    run(raw, tmp_path / "out", VIEWS)
    stored = rows_of(tmp_path / "out")["image"]
    ds = mmcompile.MMapShardDataset(tmp_path / "out")
    seen = []
    for epoch in range(3):
        ds.set_epoch(epoch)
        images, _ = ds[list(range(6))]
        seen.append(images.numpy())
    for row in range(6):
        assert sorted(epoch[row].tobytes() for epoch in seen) == sorted(view.tobytes() for view in stored[row])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"views": 1, "crop": 8}, "from 2 to 1,024"),
        ({"views": 4}, "add --crop"),
        ({"views": 4, "resize": 10, "crop": 8}, "leave --resize out"),
        ({"views": 4, "pad": 8}, "leave --pad out"),
        ({"views": {"count": 4, "scale": (0, 1)}, "crop": 8}, "0 < LOW <= HIGH"),
        ({"views": {"count": 4, "flip": 1}, "crop": 8}, "unknown flip"),
        ({"views": {"hflip": 0.5}, "crop": 8}, "how many is missing"),
        ({"views": {"count": 4, "hflip": 2}, "crop": 8}, "probability"),
        ({"views": "8", "crop": 8}, "whole number"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Preprocess(**given)


def test_settings_come_back(tmp_path: Path) -> None:
    made = Preprocess.from_settings(VIEWS.settings())
    assert made == VIEWS.resolved()
    assert "views" not in SMALL.settings()
