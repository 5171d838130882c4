"""What is drawn over a picture, pixel by pixel."""

from __future__ import annotations

import numpy as np

from mmcompile.report import draw

GREY = np.full((20, 30, 3), 100, np.uint8)


def test_a_box_covers_its_outermost_pixels() -> None:
    red = (255, 0, 0)
    made = draw.boxes(GREY, np.array([[4.0, 3.0, 14.0, 11.0]]), [red])
    drawn = np.argwhere((made == red).all(2))
    assert (drawn.min(0).tolist(), drawn.max(0).tolist()) == ([3, 4], [10, 13])
    assert len(drawn) == 2 * 10 + 2 * 6
    assert np.array_equal(made[4:10, 5:13], GREY[4:10, 5:13])
    assert np.array_equal(made[0], GREY[0])
    assert np.array_equal(made[13:], GREY[13:])


def test_a_box_in_an_enlarged_picture_lies_at_the_same_place() -> None:
    red = (255, 0, 0)
    made = draw.boxes(draw.enlarged(GREY, 3), np.array([[4.0, 3.0, 14.0, 11.0]]), [red], 3)
    drawn = np.argwhere((made == red).all(2))
    assert (drawn.min(0).tolist(), drawn.max(0).tolist()) == ([9, 12], [32, 41])


def test_boxes_at_the_edge_beyond_it_and_not_finite_are_no_fault() -> None:
    made = draw.boxes(GREY, np.array([[0, 0, 30, 20], [-9, -9, 99, 99], [29, 19, 29, 19], [np.nan, 0, 1, 1]]), [(1, 2, 3)] * 4)
    assert made.shape == GREY.shape
    for corner in ((0, 0), (0, 29), (19, 0), (19, 29)):
        assert tuple(made[corner]) == (1, 2, 3)


def test_a_mask_tints_its_ids_and_nothing_else() -> None:
    ids = np.zeros((20, 30), np.uint8)
    ids[5:12, 5:12] = 3
    made = draw.mask(GREY, ids, ())
    assert np.array_equal(made[ids == 0], GREY[ids == 0])
    wanted = np.rint(np.array(GREY[0, 0]) * 0.55 + np.array(draw.colour(3)) * 0.45)
    assert np.array_equal(made[8, 8], wanted.astype(np.uint8))
    assert not np.array_equal(made[11, 8], made[8, 8])  # the border


def test_what_counts_for_nothing_is_striped_and_has_no_colour() -> None:
    ids = np.full((20, 30), 255, np.uint8)
    made = draw.mask(GREY, ids, (255,))
    assert len(np.unique(made.reshape(-1, 3), axis=0)) == 2
    assert np.array_equal(made[:, :, 0], made[:, :, 2])


def test_points_that_are_seen_are_dots_where_they_are() -> None:
    made = draw.keypoints(GREY, np.array([[10.5, 8.5, 2.0], [20.5, 8.5, 0.0], [0.0, 0.0, 0.0], [np.nan, 1, 2]]))
    assert tuple(made[8, 10]) == draw.colour(1)
    assert np.array_equal(made[:, 16:], GREY[:, 16:])
    assert np.array_equal(made[0, 0], GREY[0, 0])


def test_colours_of_ids_differ() -> None:
    colours = np.array([draw.colour(number) for number in range(24)], int)
    far = np.abs(colours[:, None] - colours[None]).sum(2)
    assert far[~np.eye(24, dtype=bool)].min() > 30


def test_a_mask_of_as_many_ids_as_pixels_is_drawn_in_one_pass() -> None:
    """Depth that was stored as a mask, say: with a pass for each id this would take a quarter of an hour."""
    ids = np.arange(1024 * 1024).reshape(1024, 1024) - 300_000
    out = draw.mask(np.full((1024, 1024, 3), 100, np.uint8), ids, (255,))
    for number in (-300_000, -1, 1, 254, 256, 700_000):
        here = out.reshape(-1, 3)[number + 300_000]
        share = 0.45 if number == ids[-1, -1] else 0.9  # all others have a neighbour of another id
        assert here.tolist() == np.rint(100 * (1 - share) + np.array(draw.colour(number)) * share).tolist()
    assert out.reshape(-1, 3)[300_000].tolist() == [100] * 3
    assert out.reshape(-1, 3)[300_255].tolist() in ([50] * 3, [135] * 3)
