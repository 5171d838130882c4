"""Volumes of .npy, multi-page TIFF, NIfTI and DICOM: files that the libraries ship, files that they wrote, damaged ones."""

import contextlib
import gzip
import io
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from mmcompile.compiler.cast import store
from mmcompile.compiler.decode import VolumeGeometry, probe_volume, versions, volume
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

RNG = np.random.default_rng(0)
VALUES = RNG.integers(-1000, 3000, (6, 20, 30)).astype(np.int16)
AS_IS = VolumeGeometry()


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def made(*parts, name="x", geometry=AS_IS, **options):
    return volume(parts, name, Preprocess(**{"dtype": "int16", "mode": "keep", **options}), geometry)


def rejected(*parts, name="x", geometry=AS_IS, **options):
    with pytest.raises(DecodeError) as caught:
        made(*parts, name=name, geometry=geometry, **options)
    assert set(caught.value.details) >= {"stage", "code"}
    return caught.value


# ---------------------------------------------------------------- arrays, geometry


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("order", "CF")
def test_arrays_keep_their_values(dtype, order):
    values = np.asarray(np.abs(VALUES) % 200, dtype, order=order)
    found = made(npy(values), dtype=dtype)
    assert np.array_equal(found.pixels, values)
    assert (found.pixels.dtype, found.format, found.frames, found.width, found.height) == (dtype, "NPY", 6, 30, 20)
    assert made(npy(values[0]), dtype=dtype).pixels.shape == (1, 20, 30)


def test_channels_of_an_array_come_first():
    values = RNG.integers(0, 200, (6, 20, 30, 2)).astype(np.uint8)
    assert np.array_equal(made(npy(values)).pixels, values.transpose(3, 0, 1, 2))
    assert np.array_equal(made(npy(values.transpose(3, 0, 1, 2))).pixels, values.transpose(3, 0, 1, 2))
    many = npy(np.zeros((6, 7, 8, 9), np.uint8))
    assert rejected(many).details["code"] == "axes"
    assert made(many, axes="chw").pixels.shape == (6, 7, 8, 9)
    assert made(many, axes="hwc").pixels.shape == (9, 6, 7, 8)
    assert probe_volume([many], Preprocess(axes="hwc")) == ((6, 7, 8), 9)
    assert rejected(npy(np.zeros((2, 2, 2, 2, 2)))).details["code"] == "unsupported"
    assert "2 channels" in str(rejected(npy(values), geometry=VolumeGeometry(channels=0)))


@pytest.mark.parametrize("crop", [(6, 20, 30), (4, 7, 30), (3, 21, 5), (1, 1, 1), (11, 40, 33), (7, 20, 4)])
def test_a_crop_is_the_centre_as_that_of_pictures_is(crop):
    found = made(npy(VALUES), geometry=VolumeGeometry(crop=crop, fill=-7)).pixels
    assert found.shape == crop
    wanted = np.full(crop, -7, np.int16)
    here, there = [], []
    for n, m in zip(VALUES.shape, crop, strict=True):
        start = round((n - m) / 2) if n >= m else 0
        at = (m - n) // 2 if n < m else 0
        here.append(slice(at, at + min(n, m)))
        there.append(slice(start, start + min(n, m)))
    wanted[tuple(here)] = VALUES[tuple(there)]
    assert np.array_equal(found, wanted)


def test_padding_never_cuts():
    found = made(npy(VALUES), geometry=VolumeGeometry(pad=(8, 20, 31))).pixels
    assert np.array_equal(found[1:7, :, :30], VALUES)
    assert not found[0].any()
    error = rejected(npy(VALUES), geometry=VolumeGeometry(pad=(8, 19, 31)))
    assert (error.details["code"], "6x20x30" in str(error), "--crop" in str(error)) == ("size", True, True)


def test_a_stray_size_is_a_reject_that_names_both():
    assert made(npy(VALUES), geometry=VolumeGeometry(keep=(6, 20, 30))).pixels.shape == (6, 20, 30)
    error = rejected(npy(VALUES), geometry=VolumeGeometry(keep=(6, 20, 31)))
    assert error.details["code"] == "size"
    assert "6x20x30" in str(error)
    assert "6x20x31" in str(error)


def test_a_range_is_a_window_and_bytes_need_one():
    assert rejected(npy(VALUES), dtype="uint8").details["code"] == "depth-32"
    window = made(npy(VALUES), dtype="uint8", range=(-100, 200)).pixels
    assert np.array_equal(window, np.rint(np.clip((VALUES.astype(float) + 100) / 300, 0, 1) * 255))
    floats = made(npy(VALUES), dtype="float32", range=(-100, 200)).pixels
    assert (floats.min(), floats.max(), floats.dtype) == (0, 1, np.float32)


def test_fill_must_be_a_value_of_the_dtype():
    for fill in (0.5, -1, 256):
        error = rejected(npy(np.zeros((2, 2, 2), np.uint8)), geometry=VolumeGeometry(crop=(3, 3, 3), fill=fill))
        assert error.details["code"] == "value-range"


def test_the_limits_are_of_a_plane_and_of_all_of_them():
    assert rejected(npy(VALUES), max_pixels=599).details["code"] == "pixel-limit"
    assert made(npy(VALUES), max_pixels=600).pixels.shape == (6, 20, 30)
    deep = npy(np.zeros((81, 10, 10), np.int16))
    assert rejected(deep, max_pixels=1000).details["code"] == "pixel-limit"
    assert made(deep, max_pixels=1013).frames == 81


def test_the_size_is_told_before_anything_is_decoded():
    told = []
    with contextlib.suppress(DecodeError):
        volume([npy(VALUES)], "x", Preprocess(dtype="uint8"), AS_IS, lambda *size: told.append(size))
    assert told == [(30, 120)]


@pytest.mark.parametrize("parts", [(), (b"",), (b"nothing",), (b"\0" * 1000,), (npy(VALUES),) * 2, (b"\x1f\x8b\x08\0", b"x")])
def test_what_is_no_volume_is_a_reject(parts):
    assert rejected(*parts).details["code"] == "not-an-image"


def test_a_wrong_name_is_counted():
    assert made(npy(VALUES), name="x.npy").warnings == ()
    assert made(npy(VALUES), name="x.nii.gz").warnings == ("wrong-extension",)


# ---------------------------------------------------------------- TIFF


def tiff(array, **options):
    tifffile = pytest.importorskip("tifffile")
    out = io.BytesIO()
    tifffile.imwrite(out, array, photometric=options.pop("photometric", "minisblack"), **options)
    return out.getvalue()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("byteorder", "<>")
def test_the_pages_of_a_tiff_are_planes(dtype, compression, byteorder):
    values = (np.abs(VALUES) % 200).astype(np.dtype(dtype).newbyteorder(byteorder))
    data = tiff(values, compression=compression, byteorder=byteorder)
    found = made(data, name="x.tif", dtype=dtype)
    assert np.array_equal(found.pixels, values)
    assert (found.format, found.frames, found.warnings) == ("TIFF", 6, ())
    cut = made(data, dtype=dtype, geometry=VolumeGeometry(crop=(2, 3, 4))).pixels
    assert np.array_equal(cut, values[2:4, 8:11, 13:17])


def test_pages_of_colours_are_channels():
    values = RNG.integers(0, 200, (3, 8, 9, 3)).astype(np.uint8)
    assert np.array_equal(made(tiff(values, photometric="rgb")).pixels, values.transpose(3, 0, 1, 2))


def test_unlike_pages_are_a_reject_that_names_both():
    tifffile = pytest.importorskip("tifffile")
    out = io.BytesIO()
    with tifffile.TiffWriter(out) as writer:
        writer.write(np.zeros((8, 9), np.uint8))
        writer.write(np.zeros((8, 10), np.uint8))
    error = rejected(out.getvalue())
    assert "9x8" in str(error)
    assert "10x8" in str(error)


# ---------------------------------------------------------------- NIfTI


def nifti(array, affine=None, *, kind="Nifti1Image", slope=None, code=1):
    nibabel = pytest.importorskip("nibabel")
    image = getattr(nibabel, kind)(array, np.eye(4) if affine is None else affine)
    image.set_sform(image.affine, code)
    image.set_qform(image.affine, code)
    if slope is not None:
        image.header.set_slope_inter(*slope)
    return image.to_bytes()


@pytest.mark.parametrize("kind", ["Nifti1Image", "Nifti2Image"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["<i2", ">i2", "u1", "f4", "f8"])
def test_nifti_is_the_array_with_its_axes_the_other_way_round(kind, packed, dtype):
    values = (np.abs(VALUES) % 100).astype(dtype)
    data = nifti(values.transpose(2, 1, 0), kind=kind)
    found = made(gzip.compress(data) if packed else data, name="x.nii.gz" if packed else "x.nii", dtype="float64" if dtype == "f8" else "float32")
    assert np.array_equal(found.pixels, values)
    assert (found.format, found.warnings, found.width, found.height, found.frames) == ("NIFTI", (), 30, 20, 6)


def test_a_slope_is_applied_and_whole_ones_keep_whole_numbers():
    nibabel = pytest.importorskip("nibabel")
    raw = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(raw.transpose(2, 1, 0), np.eye(4))
    data = bytearray(image.to_bytes())
    for slope, inter in ((1.0, -1024.0), (2.0, 5.0), (0.5, 0.25)):
        data[112:120] = np.array([slope, inter], "<f4").tobytes()
        wanted = raw * slope + inter
        assert np.array_equal(made(bytes(data), dtype="float32").pixels, wanted)
        assert np.array_equal(nibabel.Nifti1Image.from_bytes(bytes(data)).get_fdata().T, wanted)
        if slope != 0.5:
            assert np.array_equal(made(bytes(data)).pixels, wanted)
        else:
            assert rejected(bytes(data)).details["code"] == "depth-32"


SHIPPED = ["anatomical.nii", "example4d.nii.gz", "example_nifti2.nii.gz", "functional.nii", "reoriented_anat_moved.nii", "standard.nii.gz"]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("orientation", ["apply", "ignore"])
def test_volumes_that_nibabel_ships_are_as_it_reads_them(name, orientation):
    nibabel = pytest.importorskip("nibabel")
    path = Path(nibabel.__file__).parent / "tests" / "data" / name
    if not path.exists():
        pytest.skip(f"this nibabel ships no {name}")
    image = nibabel.load(path)
    wanted = (nibabel.as_closest_canonical(image) if orientation == "apply" else image).get_fdata()
    wanted = wanted.T.astype(np.float64)
    found = made(path.read_bytes(), name=name, dtype="float64", orientation=orientation)
    assert np.array_equal(found.pixels, wanted)


@pytest.mark.parametrize("perm", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, -1, 1), (1, -1, -1)])
def test_orientation_is_applied_where_it_is_known(perm, signs):
    nibabel = pytest.importorskip("nibabel")
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for axis, (to, sign) in enumerate(zip(perm, signs, strict=True)):
        affine[to, axis] = sign * 2.0
    stored = VALUES.transpose(2, 1, 0)
    data = nifti(stored, affine)
    wanted = nibabel.as_closest_canonical(nibabel.Nifti1Image.from_bytes(data)).get_fdata().T
    assert np.array_equal(made(data).pixels, wanted)
    assert made(data).width == wanted.shape[2]
    assert np.array_equal(made(data, orientation="ignore").pixels, VALUES)
    assert np.array_equal(made(nifti(stored, affine, code=0)).pixels, VALUES)


def test_nifti_of_colours_and_of_several_times_has_channels():
    colours = np.zeros((4, 3, 2), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    colours["G"] = np.arange(24).reshape(4, 3, 2)
    found = made(nifti(colours)).pixels
    assert found.shape == (3, 2, 3, 4)
    assert np.array_equal(found[1], colours["G"].T)
    times = RNG.integers(0, 99, (4, 3, 2, 5)).astype(np.int16)
    assert np.array_equal(made(nifti(times)).pixels, times.T)


def test_damaged_nifti_is_a_reject():
    data = nifti(VALUES.transpose(2, 1, 0))
    packed = gzip.compress(data)
    assert rejected(data[:-1]).details["code"] == "truncated"
    assert rejected(packed[: len(packed) // 2]).details["stage"] == "load"
    for shape in ((32767,) * 3, (0, 5, 5), (32767, 1, 1)):
        hostile = bytearray(data)
        hostile[40:48] = np.array([3, *shape], "<i2").tobytes()
        assert rejected(bytes(hostile)).details["code"] in ("pixel-limit", "not-an-image", "truncated")
    far = bytearray(data)
    far[108:112] = np.array([1e30], "<f4").tobytes()
    assert rejected(bytes(far)).details["code"] == "corrupt"
    pair = bytearray(data)
    pair[344:348] = b"ni1\0"
    assert "second file" in str(rejected(bytes(pair)))
    assert rejected(nifti(np.zeros((2, 2, 2), np.complex64))).details["code"] == "unsupported"


# ---------------------------------------------------------------- DICOM


def test_file(name):
    pydicom = pytest.importorskip("pydicom")
    return (Path(pydicom.__file__).parent / "data" / "test_files" / name).read_bytes()


test_file.__test__ = False


def slices(count=5, **changes):
    """Files of one made-up series, as datasets: planes of 8 x 9 whose first value is their number."""
    pydicom = pytest.importorskip("pydicom")
    made = []
    for k in range(count):
        d = pydicom.dcmread(io.BytesIO(test_file("CT_small.dcm")))
        values = RNG.integers(0, 1000, (8, 9)).astype(np.int16)
        values[0, 0] = k
        d.Rows, d.Columns, d.InstanceNumber, d.PixelData = 8, 9, count - k, values.tobytes()
        d.ImageOrientationPatient, d.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, 2.5 * k]
        for name, value in changes.items():
            setattr(d, name, value)
        made.append(d)
    return made


def saved(*datasets):
    out = []
    for d in datasets:
        file = io.BytesIO()
        d.save_as(file)
        out.append(file.getvalue())
    return out


def test_a_series_is_in_hounsfield_units_and_in_order_of_its_places():
    made_up = slices()
    data = saved(*made_up)
    found = made(*data[2:], *data[:2])
    assert (found.format, found.frames, found.width, found.height, found.depth) == ("DICOM", 5, 9, 8, 0)
    assert np.array_equal(found.pixels, np.stack([d.pixel_array.astype(int) - 1024 for d in made_up]))
    row = store(found.pixels.reshape(5 * 8, 9, 1), Preprocess(dtype="int16", mode="gray"), 0)
    assert row.dtype == np.int16
    turned = slices(ImageOrientationPatient=[0, 1, 0, 1, 0, 0])
    assert made(*saved(*turned)).pixels[:, 0, 0].tolist() == [4 - 1024, 3 - 1024, 2 - 1024, 1 - 1024, -1024]
    assert made(*data, geometry=VolumeGeometry(crop=(1, 8, 9))).pixels[0, 0, 0] == 2 - 1024


def test_a_series_without_places_is_in_order_of_its_numbers():
    made_up = slices()
    for d in made_up:
        del d.ImagePositionPatient
    assert made(*saved(*made_up)).pixels[:, 0, 0].tolist() == [4 - 1024, 3 - 1024, 2 - 1024, 1 - 1024, -1024]
    made_up[1].InstanceNumber = made_up[0].InstanceNumber
    assert rejected(*saved(*made_up)).details["code"] == "series"
    del made_up[1].InstanceNumber
    assert rejected(*saved(*made_up)).details["code"] == "series"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"SeriesInstanceUID": "1.2.3"}, "2 series"),
        ({"Rows": 9, "Columns": 8}, "sizes"),
        ({"ImagePositionPatient": [0, 0, 2.5]}, "one position"),
        ({"ImageOrientationPatient": [1, 0, 0, 0, 0, 1]}, "parallel"),
        ({"PixelRepresentation": 0}, "types"),
        ({"PhotometricInterpretation": "MONOCHROME1"}, "colours"),
    ],
)
def test_files_that_are_no_one_volume_are_a_reject(change, word):
    made_up = slices()
    for name, value in change.items():
        setattr(made_up[3], name, value)
    error = rejected(*saved(*made_up))
    assert error.details["code"] == "series"
    assert word in str(error)


def test_monochrome1_is_turned_before_the_slope():
    signed = slices(1)
    plain = made(*saved(*signed)).pixels
    signed[0].PhotometricInterpretation = "MONOCHROME1"
    assert np.array_equal(made(*saved(*signed)).pixels, -1 - (plain + 1024) - 1024)
    unsigned = slices(1, PixelRepresentation=0, BitsStored=12, PhotometricInterpretation="MONOCHROME1", RescaleIntercept=0)
    stored = np.frombuffer(unsigned[0].PixelData, np.uint16).reshape(1, 8, 9)
    assert np.array_equal(made(*saved(*unsigned)).pixels, 4095 - stored)


def test_each_slice_has_its_own_slope():
    made_up = slices(3)
    for k, d in enumerate(made_up):
        d.RescaleSlope, d.RescaleIntercept = 0.5 + k, 0
    found = made(*saved(*made_up), dtype="float32").pixels
    wanted = np.stack([d.pixel_array * (0.5 + k) for k, d in enumerate(made_up)])
    assert np.array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize(
    "name", ["rtdose.dcm", "rtdose_rle.dcm", "MR_small_RLE.dcm", "MR_small_bigendian.dcm", "SC_rgb_rle_16bit_2frame.dcm", "CT_small.dcm"]
)
def test_files_that_pydicom_ships_are_as_it_reads_them(name):
    pydicom = pytest.importorskip("pydicom")
    dataset = pydicom.dcmread(io.BytesIO(test_file(name)))
    wanted = dataset.pixel_array.astype(float) * float(dataset.get("RescaleSlope", 1)) + float(dataset.get("RescaleIntercept", 0))
    found = made(test_file(name), dtype="float64").pixels
    channels = int(dataset.SamplesPerPixel) > 1
    assert np.array_equal(np.moveaxis(found, 0, -1) if channels else found, wanted.reshape((np.moveaxis(found, 0, -1) if channels else found).shape))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("examples_palette.dcm", "unsupported"),
        ("image_dfl.dcm", "unsupported"),
        ("liver_1frame.dcm", "unsupported"),
        ("rtplan.dcm", "not-an-image"),
        ("test-SR.dcm", "not-an-image"),
        ("no_meta.dcm", "not-an-image"),
        ("badVR.dcm", "corrupt"),
        ("MR_truncated.dcm", "corrupt"),
    ],
)
def test_what_is_not_read_is_a_reject(name, code):
    error = rejected(test_file(name), dtype="float32")
    assert error.details["code"] == code
    assert "truncated accept" not in str(error)


def test_a_missing_plugin_for_compressed_data_is_named(monkeypatch):
    pydicom = pytest.importorskip("pydicom")
    monkeypatch.setattr(pydicom.pixels.decoders.base.Decoder, "is_available", property(lambda self: False))
    error = rejected(test_file("MR_small_jpeg_ls_lossless.dcm"))
    assert error.details["code"] == "needs-extra"
    assert "JPEG-LS Lossless" in str(error)
    assert "pip install pylibjpeg" in str(error)


@pytest.mark.parametrize(("module", "data"), [("nibabel", lambda: nifti(VALUES)), ("pydicom", lambda: test_file("CT_small.dcm"))])
def test_a_missing_extra_is_named(module, data, monkeypatch):
    data = data()
    monkeypatch.setitem(sys.modules, module, None)
    error = rejected(data)
    assert error.details["code"] == "needs-extra"
    assert "mmcompile[medical]" in str(error)


def test_versions_of_volumes_stand_by_themselves():
    pytest.importorskip("pydicom")
    assert "pydicom" in versions("DICOM")
    assert "pydicom" not in versions()
    assert "pydicom" in versions(volumes=True)


# ---------------------------------------------------------------- damage


def seeds():
    found = [npy(VALUES), npy(np.zeros((2, 3, 4, 5)))]
    with contextlib.suppress(pytest.skip.Exception):
        found.append(tiff(VALUES, compression="zlib"))
    with contextlib.suppress(pytest.skip.Exception):
        found += [nifti(VALUES), gzip.compress(nifti(VALUES))]
    with contextlib.suppress(pytest.skip.Exception):
        found += [test_file("MR_small_RLE.dcm"), test_file("rtdose.dcm"), saved(*slices(1))[0]]
    return found


SEEDS = seeds()


@hypothesis.given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8), st.integers(0, 12_000))
@hypothesis.settings(deadline=None, max_examples=300)
def test_damaged_files_give_pixels_or_a_decode_error(seed, changes, length):
    data = bytearray(seed[:length] if length > 6000 else seed)
    for at, value in changes:
        data[at % len(data)] = value
    with contextlib.suppress(DecodeError):
        found = made(bytes(data), geometry=VolumeGeometry(crop=(3, 4, 5)), dtype="float32", max_pixels=100_000, axes="hwc")
        assert found.pixels.shape[-3:] == (3, 4, 5)
