import json
from dataclasses import replace

import numpy as np
import pytest

from mmcompile.compiler.options import notes
from mmcompile.compiler.preprocess import IMAGENET, Normalize, Preprocess
from mmcompile.compiler.rowstore import RowPreprocess
from mmcompile.errors import OptionError

ONE = Normalize((0.5,), (0.25,))
SIZE = {"resize": 256, "crop": 224}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"resize": 224, "crop": 256}, {"resize", "crop"}),
        ({"resize": (300, 200), "crop": 224}, {"resize", "crop"}),
        ({"resize": 256, "crop": (224, 300)}, {"resize", "crop"}),
        ({"resize": 256}, {"resize", "crop"}),
        ({"resize": 256, "pad": 224}, {"resize", "pad"}),
        ({"crop": 224, "pad": 224}, {"crop", "pad"}),
        ({"keep_size": (2, 3), "crop": 2}, {"keep_size", "crop"}),
        ({"crop": 0}, {"crop"}),
        ({"crop": -1}, {"crop"}),
        ({"crop": True}, {"crop"}),
        ({"crop": 2.5}, {"crop"}),
        ({"crop": (1, 2, 3, 4)}, {"crop"}),
        ({"crop": (1, 2, 3), "resize": (4, 4)}, {"crop", "resize"}),
        ({"kind": "volume", "crop": (1, 2)}, {"crop"}),
        ({"kind": "volume", "resize": (4, 4)}, {"resize"}),
        ({"kind": "volume", "layout": "hwc"}, {"layout"}),
        ({"pad": (3, 4)}, {"pad"}),
        ({"resize": (10, 100_000)}, {"resize"}),
        ({"mode": "bgr"}, {"mode"}),
        ({"dtype": "int8"}, {"dtype"}),
        ({"layout": "nchw"}, {"layout"}),
        ({"filter": "area"}, {"filter"}),
        ({"resampler": "torch", "filter": "lanczos"}, {"resampler", "filter"}),
        ({"resampler": "torch", "mode": "rgba"}, {"resampler", "mode"}),
        ({"resampler": "torch", "mode": "keep", "kept_mode": "RGBA"}, {"resampler", "mode"}),
        ({"resampler": "torch", "compat": "torchvision"}, {"resampler", "compat"}),
        ({"alpha": "red"}, {"alpha"}),
        ({"alpha": "#FFFFFF"}, {"alpha"}),
        ({"alpha": "white", "mode": "rgba"}, {"alpha", "mode"}),
        ({"alpha": "keep"}, {"alpha", "mode"}),
        ({"kept_mode": "L"}, {"kept_mode", "mode"}),
        ({"depth16": "keep"}, {"depth16", "dtype"}),
        ({"depth16": "scale", "dtype": "uint16"}, {"depth16", "dtype"}),
        ({"depth16": "scale", "dtype": "float32"}, {"depth16", "dtype"}),
        ({"range": (1.0, 1.0)}, {"range"}),
        ({"range": (0.0, float("nan"))}, {"range"}),
        ({"range": (0.0, 1.0), "dtype": "int16"}, {"range", "dtype"}),
        ({"normalize": "cifar"}, {"normalize"}),
        ({"normalize": 3}, {"normalize"}),
        ({"normalize": "auto", "dtype": "float32"}, {"normalize", "dtype"}),
        ({"normalize": "auto", "dtype": "bfloat16"}, {"normalize", "dtype"}),
        ({"normalize": "imagenet", "mode": "gray"}, {"normalize", "mode"}),
        ({"normalize": "imagenet", "scale": "none"}, {"normalize", "scale"}),
        ({"normalize": "imagenet", "mode": "rgba"}, {"normalize", "mode"}),
        ({"normalize": ONE}, {"normalize", "mode"}),
        ({"normalize": IMAGENET, "mode": "keep", "kept_mode": "L"}, {"normalize", "mode"}),
        ({"normalize": "imagenet", "dtype": "int32"}, {"normalize", "dtype"}),
        ({"max_pixels": 0}, {"max_pixels"}),
        ({"max_aspect": 0.5}, {"max_aspect"}),
        ({"max_aspect": float("inf")}, {"max_aspect"}),
    ],
)
def test_a_clash_is_an_option_error_that_names_the_options(options, named):
    with pytest.raises(OptionError) as caught:
        Preprocess(**options)
    assert set(caught.value.details["options"]) == named
    for name in named:
        assert name.replace("_", "-") in str(caught.value)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5,), (1e-31,)),
        ((0.5,), (0.0,)),
        ((0.5,), (-1.0,)),
        ((0.5,), (float("nan"),)),
        ((float("inf"),), (1.0,)),
        ((0.5, 0.5), (1.0,)),
        ((), ()),
        ([0.5], [1.0]),
        ((True,), (1.0,)),
    ],
)
def test_normalize_needs_finite_means_and_positive_deviations(mean, std):
    with pytest.raises(OptionError):
        Normalize(mean, std)


def test_auto_with_a_float_dtype_names_the_remedy():
    with pytest.raises(OptionError, match=r"--dtype uint8.*--mean and --std"):
        Preprocess(**SIZE, normalize="auto", dtype="float32")


def test_presets_fill_in_what_was_left_open():
    faithful = Preprocess(**SIZE).resolved()
    assert (faithful.resampler, faithful.orientation, faithful.alpha, faithful.depth16) == ("torch", "apply", "white", "reject")
    compat = Preprocess(**SIZE, compat="torchvision").resolved()
    assert (compat.resampler, compat.orientation, compat.alpha, compat.depth16) == ("pillow", "ignore", "drop", "clip")
    departed = Preprocess(**SIZE, compat="torchvision", orientation="apply", alpha="black").resolved()
    assert (departed.orientation, departed.alpha) == ("apply", "black")
    assert Preprocess(**SIZE, dtype="float32").resolved().depth16 == "keep"


ALL = [
    Preprocess(**SIZE),
    Preprocess(**SIZE, compat="torchvision"),
    Preprocess(pad=64, filter="lanczos", mode="rgba"),
    Preprocess(resize=(3, 5), mode="gray", dtype="bfloat16", normalize=ONE, layout="hwc"),
    Preprocess(mode="keep", kept_mode="LA", keep_size=(7, 9), icc="srgb", frames="error", truncated="accept", max_aspect=20),
    Preprocess(crop=(4, 6), range=(-1, 2), alpha="#102030", max_pixels=1000),
    Preprocess(crop=4, normalize="imagenet"),
    Preprocess(crop=4, normalize="auto"),
]


@pytest.mark.parametrize("options", ALL)
def test_resolving_twice_changes_nothing(options):
    assert options.resolved().resolved() == options.resolved()


@pytest.mark.parametrize("options", ALL)
def test_settings_survive_canonical_json(options):
    text = json.dumps(options.settings(), sort_keys=True, allow_nan=False)
    again = Preprocess.from_settings(json.loads(text))
    assert again == options.resolved()
    assert json.dumps(again.settings(), sort_keys=True) == text


@pytest.mark.parametrize(
    "settings",
    [{"colour": 1}, {"normalize": {"mean": [1.0]}}, {"normalize": {"mean": 1.0, "std": 1.0}}, {"dtype": "object"}, {"crop": [1, "x"]}],
)
def test_settings_of_a_stranger_are_an_option_error(settings):
    with pytest.raises(OptionError):
        Preprocess.from_settings(settings)


def test_the_pixel_fingerprint_ignores_how_rows_are_stored():
    base = Preprocess(**SIZE)
    assert base.pixel_settings() == replace(base, layout="hwc", normalize=Normalize((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), scale="none").pixel_settings()
    assert base.pixel_settings() == Preprocess(**SIZE, resampler="torch", alpha="white").pixel_settings()
    # 16-bit sources are rejected by one and kept by the other.
    assert base.pixel_settings() != replace(base, dtype="float32").pixel_settings()
    for change in (
        {"crop": 200},
        {"orientation": "ignore"},
        {"alpha": "black"},
        {"filter": "bicubic"},
        {"max_pixels": 5},
        {"mode": "gray"},
    ):
        assert base.pixel_settings() != replace(base, **change).pixel_settings()


def test_the_store_fingerprint_holds_baked_normalisation_only():
    deferred = Preprocess(**SIZE, normalize="imagenet")
    assert deferred.store_settings() == Preprocess(**SIZE).store_settings()
    assert deferred.read_normalize() == IMAGENET
    baked = Preprocess(**SIZE, normalize="imagenet", dtype="float16")
    assert baked.store_settings()["normalize"] == {"mean": list(IMAGENET.mean), "std": list(IMAGENET.std)}
    assert baked.read_normalize() is None
    assert Preprocess(**SIZE, normalize="auto").read_normalize() is None


@pytest.mark.parametrize(
    ("options", "sample", "row", "dtype"),
    [
        (Preprocess(**SIZE), (3, 224, 224), (3, 224, 224), "<u1"),
        (Preprocess(**SIZE, layout="hwc"), (3, 224, 224), (224, 224, 3), "<u1"),
        (Preprocess(resize=(3, 5), mode="gray", dtype="bfloat16"), (1, 3, 5), (1, 3, 5), "<u2"),
        (Preprocess(pad=8, mode="rgba", dtype="float64", layout="hwc"), (4, 8, 8), (8, 8, 4), "<f8"),
        (Preprocess(resize=(9, 9), crop=(4, 6), mode="keep", kept_mode="LA"), (2, 4, 6), (2, 4, 6), "<u1"),
        (Preprocess().with_size(7, 9), (3, 7, 9), (3, 7, 9), "<u1"),
    ],
)
def test_shapes_follow_from_the_options(options, sample, row, dtype):
    assert options.sample_shape() == sample
    assert options.row_shape() == row
    assert options.stored_dtype() == np.dtype(dtype)


def test_what_is_not_known_yet_is_said():
    assert Preprocess().needs_size()
    assert not Preprocess(crop=3).needs_size()
    assert not Preprocess().with_size(2, 2).needs_size()
    with pytest.raises(OptionError, match="--resize"):
        Preprocess().output_hw()
    with pytest.raises(OptionError, match="keep"):
        Preprocess(crop=3, mode="keep").sample_shape()


def test_notes_say_which_kernel_was_taken():
    assert notes(Preprocess(**SIZE)) == ()
    assert "lanczos" in notes(Preprocess(**SIZE, filter="lanczos"))[0]
    assert "rgba" in notes(Preprocess(**SIZE, mode="rgba"))[0]
    assert notes(Preprocess(crop=3, mode="rgba")) == ()
    assert notes(Preprocess(**SIZE, filter="lanczos", resampler="pillow")) == ()


@pytest.mark.parametrize(
    ("dtype", "scale", "divisor"),
    [("uint8", "unit", 255.0), ("uint16", "unit", 65535.0), ("uint8", "none", 1.0), ("int32", "unit", 1.0), ("float32", "unit", 1.0)],
)
def test_a_reader_divides_by_the_full_scale_of_integers(dtype, scale, divisor):
    assert Preprocess(**SIZE, dtype=dtype, scale=scale).read_scale() == divisor


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dtype": "float32"}, "dtype of a mask must be uint8, uint16, int16 or int32, as ids are whole numbers, found float32"),
        ({"dtype": "bfloat16"}, "dtype of a mask must be"),
        ({"fill": 256}, "fill 256 is no value of uint8, which holds 0 to 255: give another one, or a wider dtype"),
        ({"fill": 40000, "dtype": "int16"}, "fill 40000 is no value of int16"),
    ],
)
def test_a_mask_holds_whole_numbers_its_fill_too(field, message):
    with pytest.raises(OptionError, match=message):
        Preprocess(crop=8, fields={"mask": {"kind": "mask", **field}})
    with pytest.raises(OptionError, match=message):
        Preprocess(crop=8, fields={"mask": field}).with_parts((("image", "image"), ("mask", "mask")))
    assert Preprocess(crop=8, fields={"mask": {"kind": "mask", "fill": 300, "dtype": "int32"}}).options


def test_imagenet_s_numbers_are_not_for_the_counts_of_rows():
    with pytest.raises(OptionError, match="--normalize and --scale clash: imagenet's numbers are of values from 0 to 1"):
        RowPreprocess(normalize="imagenet", scale="none")
