import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from mmcompile.compiler import kernel, resample
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.resample import Fit, Maker, fit, is_giant, place, sample
from mmcompile.errors import DecodeError

PHOTO = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)


@pytest.mark.parametrize(
    ("size", "options", "wanted"),
    [
        ((375, 500), {"resize": 256, "crop": 224}, Fit((256, 341), 16, 58, (224, 224))),
        ((500, 375), {"resize": 256, "crop": 224}, Fit((341, 256), 58, 16, (224, 224))),
        ((256, 257), {"resize": 256, "crop": 224}, Fit((256, 257), 16, 16, (224, 224))),
        ((256, 259), {"resize": 256, "crop": 224}, Fit((256, 259), 16, 18, (224, 224))),
        ((10, 20), {"crop": 15}, Fit((10, 20), -2, 2, (15, 15))),
        ((10, 20), {"crop": (4, 31)}, Fit((10, 20), 3, -5, (4, 31))),
        ((30, 40), {"pad": 20}, Fit((15, 20), -2, 0, (20, 20))),
        ((1000, 1), {"pad": 20}, Fit((20, 1), 0, -9, (20, 20))),
        ((30, 40), {"resize": (7, 9)}, Fit((7, 9), 0, 0, (7, 9))),
        ((30, 40), {"keep_size": (30, 40)}, Fit((30, 40), 0, 0, (30, 40))),
    ],
)
def test_a_picture_lands_where_the_options_say(size, options, wanted):
    assert fit(*size, Preprocess(**options)) == wanted


@pytest.fixture
def functional():
    return pytest.importorskip("torchvision.transforms.v2.functional", reason="torchvision is not installed")


def test_rounding_is_torchvisions(functional):
    """Every output pixel of Resize + CenterCrop comes from where `fit` says, on an image whose pixels name their place."""
    import torch

    sizes = [(7, 9), (9, 7), (10, 33), (33, 10), (31, 64), (11, 11), (3, 50), (20, 21), (21, 20)]
    for size in sizes:
        for short, crop in [(8, (8, 8)), (9, (4, 7)), (10, (9, 2)), (13, (13, 12))]:
            fitted = fit(*size, Preprocess(resize=short, crop=crop))
            picture = torch.zeros((1, *size), dtype=torch.uint8)
            resized = functional.resize(picture, [short], antialias=True)
            assert tuple(resized.shape[1:]) == fitted.size
        for crop in [(4, 4), (5, 40), (40, 5), (50, 51), size]:
            places = torch.arange(1, size[0] * size[1] + 1).reshape(1, *size)
            part = np.arange(1, size[0] * size[1] + 1).reshape(*size, 1)
            fitted = fit(*size, Preprocess(crop=crop))
            top, left, bottom, right = fitted.window()
            found = place(part[top:bottom, left:right], fitted)
            assert np.array_equal(found[:, :, 0], functional.center_crop(places, list(crop))[0].numpy())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(256, 341), (100, 90), (500, 700), (375, 20), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resize_is_torchvisions_on_uint8_tensors(functional, mode, size, channels):
    import torch

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torchvision takes the uint8 kernel on AVX2 and AVX512 only")
    pixels = np.ascontiguousarray(PHOTO[:, :, :channels])
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    wanted = functional.resize(tensor, list(size), interpolation=getattr(functional.InterpolationMode, mode.upper()), antialias=True)
    assert np.array_equal(resample.resize(pixels, size, mode), wanted.permute(1, 2, 0).numpy())


#: A process that has loaded nothing before: does the module load torch, how many threads has a worker, and (in forks of it, as torch looks for an
#: instruction set once, when it first computes) what comes out on each.
FRESH = """
import hashlib, json, os, sys
import numpy as np
from mmcompile.compiler import kernel, resample
said = {"torch": "torch" in sys.modules}
resample.initialise()
import torch
said["threads"] = torch.get_num_threads()
said["found"] = []
for capability in ("default", "avx2", "avx512"):
    reading, writing = os.pipe()
    if not os.fork():
        os.environ["ATEN_CPU_CAPABILITY"] = capability
        torch.set_num_threads(2)
        pixels = np.random.default_rng(0).integers(0, 256, (150, 201, 4), np.uint8)
        found = hashlib.sha256()
        for channels in (1, 3, 4):
            for size in ((128, 171), (45, 50), (250, 350), (150, 10), (10, 201)):
                for name in ("bilinear", "bicubic"):
                    made = resample.resize(np.ascontiguousarray(pixels[:, :, :channels]), size, name)
                    found.update(np.ascontiguousarray(made).tobytes())
        os.write(writing, f"{torch.backends.cpu.get_cpu_capability()} {found.hexdigest()}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        said["found"].append(answer.read().split())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def fresh():
    return json.loads(subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True).stdout)


def test_bytes_do_not_depend_on_the_instruction_set(fresh):
    assert fresh["found"][0][0] == "DEFAULT"
    if len({name for name, _ in fresh["found"]}) < 2:
        pytest.skip("this processor has one of the instruction sets only")
    assert len({digest for _, digest in fresh["found"]}) == 1


def test_a_meaningless_fourth_channel_changes_no_other():
    padded = np.concatenate([PHOTO, np.full((375, 500, 1), 77, np.uint8)], axis=2)
    assert np.array_equal(resample.resize(padded, (256, 341), "bilinear")[:, :, :3], resample.resize(PHOTO, (256, 341), "bilinear"))


def never(*_):
    raise AssertionError("the whole picture was asked for")


def maker(pixels, by_pillow=never):
    return Maker(lambda padded: pixels, by_pillow, True)


@pytest.mark.parametrize("geometry", [{"resize": 64, "crop": 48}, {"resize": (64, 400), "crop": (48, 90)}, {"pad": 64}])
def test_giants_take_the_exact_kernel(geometry, monkeypatch):
    options = Preprocess(**geometry, resampler="torch").resolved()
    ordinary = sample(375, 500, options, maker(PHOTO))
    monkeypatch.setattr(resample, "GIANT_PIXELS", 10)
    monkeypatch.setattr(resample, "_GIANT_RATIO", 0)
    assert is_giant(375, 500, fit(375, 500, options))
    monkeypatch.setattr(resample, "resize", never)
    assert np.array_equal(sample(375, 500, options, maker(PHOTO)), ordinary)


@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (1, 60_000), (60_000, 1)])
@pytest.mark.parametrize("resampler", ["torch", "pillow"])
def test_extreme_shapes_never_make_a_giant(shape, resampler, monkeypatch):
    monkeypatch.setattr(resample, "resize", never)
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    made = sample(*shape, Preprocess(resize=256, crop=224, resampler=resampler).resolved(), maker(pixels))
    assert made.shape == (224, 224, 3)
    # One pixel thick: all lines across are the same.
    lines = made if shape[1] == 1 else made.transpose(1, 0, 2)
    assert np.array_equal(lines, np.broadcast_to(lines[:, :1], lines.shape))
    assert len(np.unique(lines[:, 0, 0])) > 1


def test_a_wide_picture_squeezed_into_a_line_makes_no_giant_between_the_passes():
    fitted = fit(10_000_000, 2, Preprocess(resize=(64, 64)))
    assert is_giant(10_000_000, 2, fitted)
    assert not is_giant(3000, 4000, fit(3000, 4000, Preprocess(resize=256, crop=224)))
    # As large as what is kept of it: no giant.
    assert not is_giant(100, 100, fit(100, 100, Preprocess(resize=(5000, 5000))))


def test_a_stray_among_kept_sizes_names_both():
    with pytest.raises(DecodeError, match=r"3x2 .* 5x4") as caught:
        sample(2, 3, Preprocess(keep_size=(4, 5)).resolved(), maker(PHOTO))
    assert caught.value.details["code"] == "size"


def test_padding_is_zero_and_centred():
    part = np.ones((2, 3, 1), np.uint8)
    made = place(part, Fit((2, 3), -1, -1, (5, 5)))
    assert made[:, :, 0].tolist() == [[0] * 5, [0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0] * 5, [0] * 5]
    assert place(part, Fit((2, 3), 0, 0, (2, 3))) is part


def test_the_version_of_torch_has_no_build_tag():
    assert "+" not in resample.versions()["torch"]


def test_workers_resize_with_one_thread(fresh):
    assert fresh["threads"] == 1


def test_importing_the_module_does_not_import_torch(fresh):
    assert not fresh["torch"]


def test_the_kernel_is_told_whose_rules(monkeypatch):
    seen = []
    monkeypatch.setattr(kernel, "window", lambda pixels, box, rules: seen.append(rules) or np.zeros((224, 224, 3), np.uint8))
    for resampler in ("torch", "pillow"):
        sample(1, 5000, Preprocess(resize=256, crop=224, resampler=resampler).resolved(), maker(PHOTO))
    assert [(r.resampler, r.filter, r.tall_rows_first) for r in seen] == [("torch", "bilinear", False), ("pillow", "bilinear", True)]


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from(["bilinear", "bicubic"]),
    st.sampled_from([1, 3, 4]),
)
def test_resizing_what_is_shown_gives_that_part_of_the_whole(size, made, part, filter, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, channels), dtype=np.uint8)
    shown = tuple(max(1, round(share * side)) for share, side in zip(part, made, strict=True))
    whole = resample.resize(pixels, made, filter)
    assert np.array_equal(resample.resize(pixels, made, filter, shown), whole[: shown[0], : shown[1]])


def test_a_resized_picture_keeps_its_pixels_together():
    """torch would take them apart, at half the cost of the resize itself."""
    for channels in (3, 4):
        made = resample.resize(np.zeros((375, 500, channels), np.uint8), (256, 341), "bilinear", (240, 283))
        assert made.strides == (283 * channels, channels, 1)


def test_a_trimmed_axis_of_as_many_outputs_as_inputs_is_resized():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 100, 3), dtype=np.uint8)
    assert kernel.trim(100, 150, 100, "bilinear") is not None
    assert np.array_equal(resample.resize(pixels, (60, 150), "bilinear", (60, 100)), resample.resize(pixels, (60, 150), "bilinear")[:, :100])


def test_less_is_computed_of_a_usual_photo():
    assert kernel.trim(500, 341, 282, "bilinear") is not None
    assert kernel.trim(500, 341, 341, "bilinear") is None
    assert kernel.trim(256, 256, 200, "bilinear") is None
