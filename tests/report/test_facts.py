"""Facts about sources and values, held against the arrays that a dataset was made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmcompile.format.index import Field, Names
from mmcompile.report import charts, facts
from mmcompile.report.opened import Opened
from tests.compiler import builds
from tests.support import make_dataset

RNG = np.random.default_rng(0)


def test_sources_of_a_build_are_counted(tmp_path: Path) -> None:
    builds.make_raw(tmp_path / "raw", per_class=5)
    builds.write(tmp_path / "raw", {"cat/wide.png": builds.picture(7, size=(30, 9)), "cat/wrong.png": builds.picture(8, "JPEG")})
    builds.run(tmp_path / "raw", tmp_path / "out")
    data = Opened(tmp_path / "out")
    try:
        found = facts.read_sources(data)
    finally:
        data.close()
    assert found is not None
    files = [path for path in (tmp_path / "raw").rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    assert (found.samples, found.bytes, found.smallest, found.largest) == (12, sum(sizes), min(sizes), max(sizes))
    assert dict(found.formats) == {"PNG": 7, "JPEG": 5}
    assert dict(found.modes) == {"RGB": 12}
    assert dict(found.flags) == {"wrong-extension": 1}
    assert (found.sizes.tolist(), found.counts.tolist()) == ([[10, 12], [30, 9]], [11, 1])


def test_a_split_has_its_own_sources_and_labels_whatever_the_shards(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (23, 1, 4, 4), dtype=np.uint8)
    labels = RNG.integers(0, 3, 23)
    make_dataset(tmp_path, images, labels, shards=(5, 6, 7, 5), splits={"train": 9, "val": 14})
    for name, part in (("train", slice(0, 9)), ("val", slice(9, 23)), ("all", slice(0, 23)), (None, slice(0, 23))):
        data = Opened(tmp_path, name)
        told = list(data.labels())
        assert np.array_equal(np.concatenate([rows for rows, _ in told]), np.arange(len(data)))
        assert np.array_equal(np.concatenate([found for _, found in told]), labels[part])
        found = facts.read_sources(data)
        assert found is not None
        assert found.samples == len(data) == len(labels[part])
        (sample,) = data.samples(np.array([2]))
        assert np.array_equal(sample.variants[0]["image"], images[part][2])
        assert sample.label == labels[part][2]
        data.close()


def test_sizes_that_are_put_together_in_between_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_PENDING", 2)
    make_dataset(tmp_path, RNG.integers(0, 256, (12, 1, 4, 4), dtype=np.uint8), shards=(3, 3, 3, 3))
    data = Opened(tmp_path)
    found = facts.read_sources(data)
    data.close()
    assert found is not None
    assert (found.sizes.tolist(), found.counts.tolist()) == ([[4, 4]], [12])


def test_rows_without_sources_of_their_own_have_no_facts_about_them(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": np.zeros((4, 2), np.float32)}, keyed=False)
    data = Opened(tmp_path)
    assert facts.read_sources(data) is None
    data.close()


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_histograms_are_of_channels(layout: str) -> None:
    rows = RNG.integers(0, 256, (5, 3, 6, 7), dtype=np.uint8)
    rows[:, 1] //= 2
    shape = (3, 6, 7) if layout == "chw" else (6, 7, 3)
    stored = rows if layout == "chw" else rows.transpose(0, 2, 3, 1)
    found = facts.histograms(Field("image", "uint8", shape, "image", layout, 255.0), np.ascontiguousarray(stored))
    assert [one.name for one in found] == ["red", "green", "blue"]
    for c, one in enumerate(found):
        assert (one.low, one.high, one.values) == (rows[:, c].min(), rows[:, c].max(), 5 * 6 * 7)
        assert sum(one.counts) == one.values
        assert one.mean == pytest.approx(rows[:, c].mean())
        assert one.std == pytest.approx(rows[:, c].std())


def test_histograms_of_columns_have_their_names_and_leave_out_what_is_not_finite() -> None:
    rows = np.array([[1.0, np.nan], [3.0, 5.0], [2.0, np.inf]], np.float32)
    first, second = facts.histograms(Field("x", "float32", (2,), "value", columns=Names(("a", "b"))), rows)
    assert (first.name, first.low, first.high, first.values, first.strange) == ("a", 1.0, 3.0, 3, 0)
    assert (first.counts[0], first.counts[-1]) == (1, 1)
    assert (second.name, second.low, second.high, second.values, second.strange) == ("b", 5.0, 5.0, 1, 2)


def test_variants_and_views_of_bits_are_no_fault() -> None:
    bits = np.full((2, 4, 3, 5, 5), 0x3F80, np.uint16)
    found = facts.histograms(Field("image", "bfloat16", (4, 3, 5, 5), "image", "chw", views=4), bits)
    assert [(one.low, one.high, one.values) for one in found] == [(1.0, 1.0, 200)] * 3


def test_many_values_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_MOST_VALUES", 100)
    (one,) = facts.histograms(Field("x", "int64", (), "value"), np.arange(10_000))
    assert 90 <= one.values <= 110
    assert one.high > 9_800


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3.0, "3"), (1234567, "1,234,567"), (0.123456, "0.1235"), (26780.4, "26,780"), (-2.5, "-2.5"), (1e20, "1e+20")]
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert charts.number(value) == text


def test_a_cloud_counts_every_source_once() -> None:
    sizes = RNG.integers(1, 5000, (300, 2))
    counts = RNG.integers(1, 9, 300)
    drawn = charts.cloud(sizes, counts)
    told = [int(part.split("<", 1)[0].rsplit(": ", 1)[1].replace(",", "")) for part in drawn.split("<title>")[1:]]
    assert sum(told) == counts.sum()


def test_a_few_values_far_out_leave_the_others_a_shape() -> None:
    values = np.append(RNG.normal(0, 1, 5000), [1e6, -1e6])
    (one,) = facts.histograms(Field("x", "float64", (), "value"), values)
    assert (one.least, one.most) == (-1e6, 1e6)
    assert -5 < one.low < one.high < 5
    assert sum(one.counts) == 5002
    assert sum(count > 0 for count in one.counts) > 40
    drawn = charts.histogram(one)
    assert "&le; " in drawn
    assert "&ge; " in drawn


@pytest.mark.parametrize(("dtype", "parts"), [(np.uint8, 64), (np.int16, 54), (np.bool_, 2)])
def test_parts_hold_as_many_integers_each(dtype: type, parts: int) -> None:
    values = {np.uint8: np.arange(256), np.int16: np.arange(-100, 116), np.bool_: np.arange(2)}[dtype].astype(dtype)
    (one,) = facts.histograms(Field("x", np.dtype(dtype).name, (), "value"), np.tile(values, 3))
    assert len(one.counts) == parts
    assert len(set(one.counts)) == 1


def test_a_line_keeps_its_peaks_and_its_order() -> None:
    drawn = charts.line(np.arange(1000.0)[::-1] ** 2, "falling")
    heights = [float(point.split(",")[1]) for point in drawn.split('points="')[1].split('"')[0].split()]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (4.0, 36.0)
