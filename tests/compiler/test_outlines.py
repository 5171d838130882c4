"""Outlines of COCO as pixels: those that pycocotools fills, to the pixel."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmcompile.compiler.sources import outlines
from mmcompile.compiler.sources.numbers import Misfit
from mmcompile.compiler.sources.outlines import mask_bytes, mask_key, mask_stat, outline

masks = pytest.importorskip("pycocotools.mask")
#: Of pycocotools' own.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

COORDINATES = st.one_of(st.integers(-8, 48).map(float), st.floats(-8, 48, allow_nan=False).map(lambda v: round(v, 2)))
POLYGONS = st.lists(
    st.lists(st.tuples(COORDINATES, COORDINATES), min_size=3, max_size=12).map(lambda p: [v for xy in p for v in xy]), min_size=1, max_size=3
)


def oracle(shape: Any, width: int, height: int) -> Any:
    """As COCO.annToMask."""
    if isinstance(shape, list):
        shape = masks.merge(masks.frPyObjects(shape, height, width))
    elif isinstance(shape["counts"], list):
        shape = masks.frPyObjects(shape, height, width)
    return masks.decode(shape).astype(bool)


@given(POLYGONS, st.integers(1, 40), st.integers(1, 40))
def test_polygons_are_filled_as_pycocotools_fills_them(shape: Any, width: int, height: int) -> None:
    np.testing.assert_array_equal(outline(shape, width, height), oracle(shape, width, height))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_run_lengths_are_read_compressed_or_not(width: int, height: int, seed: int, share: float) -> None:
    wanted = np.random.default_rng(seed).random((height, width)) < share
    packed = masks.encode(np.asfortranarray(wanted.astype(np.uint8)))
    np.testing.assert_array_equal(outline({"size": [height, width], "counts": packed["counts"].decode()}, width, height), wanted)
    flat = wanted.T.reshape(-1).astype(int)
    ends = np.flatnonzero(np.diff(flat)) + 1
    counts = [0] * int(flat[0]) + np.diff([0, *ends, len(flat)]).tolist()
    np.testing.assert_array_equal(outline({"size": [height, width], "counts": counts}, width, height), wanted)


def test_large_polygons() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        shape = [(rng.random(2 * int(rng.integers(3, 200))) * 700 - 20).round(2).tolist()]
        np.testing.assert_array_equal(outline(shape, 640, 480), oracle(shape, 640, 480))
    shape = [[0, 0, 9, 0, 9, 9], [10.5, 3, 20, 30.25]]
    np.testing.assert_array_equal(outline(shape, 64, 48), oracle(shape, 64, 48))


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_edges_are_walked_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    rng = np.random.default_rng(4)
    shapes = [[(rng.random(2 * int(rng.integers(3, 12))) * 30 - 5).round(2).tolist()] for _ in range(20)]
    whole = [outline(shape, 24, 18) for shape in shapes]
    monkeypatch.setattr(outlines, "_CHUNK", chunk)
    for shape, wanted in zip(shapes, whole, strict=True):
        np.testing.assert_array_equal(outline(shape, 24, 18), wanted)


def test_an_outline_that_leads_far_away_takes_little_memory() -> None:
    shape = [[-4e5, -4e5, 4e5, 4e5, 4e5, 4.1e5] * 2]
    tracemalloc.start()
    try:
        found = outline(shape, 24, 18)
        assert tracemalloc.get_traced_memory()[1] < 500 << 20
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found, oracle(shape, 24, 18))


def test_later_objects_cover_earlier_ones_and_a_crowd_is_beneath() -> None:
    square = [[0, 0, 0, 4, 4, 4, 4, 0]]
    right = [[2, 0, 2, 4, 6, 4, 6, 0]]
    crowd = {"size": [5, 8], "counts": [5, 35]}
    key = mask_key(b"a.json#1", 8, 5, 255, [(0, False, square), (1, False, right), (0, True, crowd)])
    data = mask_bytes(key)
    assert mask_stat(key)[0] == len(data)
    found = np.asarray(Image.open(io.BytesIO(data)))
    assert found.tolist() == [[1, 1, 2, 2, 2, 2, 255, 255]] * 4 + [[0] + [255] * 7]
    wide = np.asarray(Image.open(io.BytesIO(mask_bytes(mask_key(b"a.json#1", 8, 5, 300, [(299, False, square)])))))
    assert wide[0, 0] == 300


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ([], "no list of polygons"),
        ([[1, 2, 3]], "is no polygon"),
        ([[1, 2, 3, 4, float("nan"), 6]], "is no polygon"),
        ({"size": [4, 8], "counts": [40]}, "run lengths of size"),
        ({"size": [5, 8], "counts": [41]}, "add up to 40"),
        ({"size": [5, 8], "counts": [-1, 41]}, "add up to 40"),
        ({"size": [5, 8], "counts": "\x7f\x7f"}, "no compressed run lengths"),
        ({"size": [5, 8], "counts": "`"}, "end early"),
    ],
)
def test_what_is_no_outline_is_a_misfit(shape: Any, why: str) -> None:
    with pytest.raises(Misfit, match=why):
        outline(shape, 8, 5)
