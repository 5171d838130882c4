"""Volumes built from files and series, alone and with labels: their values as they are, one geometry for all, and errors where sizes differ."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from mmcompile import Augment, MMapShardDataset, ShardLoader
from mmcompile.cli import program
from mmcompile.compiler.preprocess import Normalize, Preprocess
from mmcompile.compiler.sources.choose import Raw, SourceOptions, open_source
from mmcompile.errors import DecodeError, OptionError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from mmcompile.summary import build_lines
from tests.compiler.builds import dataset, inline, keys, picture, run, write

KIND = {"image": {"kind": "volume"}}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


def values(seed: int, shape: tuple[int, ...] = (4, 6, 8)) -> Any:
    return np.random.default_rng(seed).integers(-1000, 2000, shape).astype(np.int16)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def pages(array: Any) -> bytes:
    images = [Image.fromarray(plane) for plane in array]
    out = io.BytesIO()
    images[0].save(out, "TIFF", save_all=True, append_images=images[1:])
    return out.getvalue()


def rows_of(out: Path) -> dict[str, Any]:
    reader = Reader(out)
    return {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


def field_of(out: Path, name: str = "image") -> Any:
    return next(f for f in Reader(out).index.fields if f.name == name)


def test_volumes_in_class_folders_keep_their_values_and_their_size(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    write(raw, {f"{c}/{i}.npy": npy(values(10 * k + i)) for k, c in enumerate(("ill", "well")) for i in range(3)})
    asked = Preprocess(dtype="int16", fields=KIND)
    report = run(Raw(raw), out, asked)
    rows = rows_of(out)
    assert np.array_equal(rows["image"], [values(10 * k + i) for k in range(2) for i in range(3)])
    assert rows["label"].tolist() == [0, 0, 0, 1, 1, 1]
    spec = field_of(out)
    assert (spec.meaning, spec.shape, spec.dtype, spec.layout) == ("volume", (4, 6, 8), "int16", None)
    assert report.shape == (4, 6, 8)
    samples = Reader(out).samples(0)
    assert np.array_equal(samples["sum"][0], [values(0).astype(np.int64).sum()])
    assert verify(out).ok
    again = run(Raw(raw), out, asked)
    assert (again.decoded, again.kept) == (0, 6)
    write(raw, {"ill/1.npy": npy(values(77))})
    report = run(Raw(raw), out, asked)
    assert (report.decoded, report.copied + report.kept) == (1, 5)
    run(Raw(raw), tmp_path / "clean", asked, workers=1)
    assert dataset(out) == dataset(tmp_path / "clean")


def test_volumes_of_many_sizes_are_cropped_or_padded_and_never_resized(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write(raw, {"a.npy": npy(values(0)), "b.npy": npy(values(1, (5, 7, 8)))})
    with pytest.raises(OptionError, match=r"2 sizes \(depth x height x width\) from 4 x 6 x 8 to 5 x 7 x 8: say with --crop DxHxW"):
        run(Raw(raw), tmp_path / "out", Preprocess(dtype="int16", fields=KIND))
    run(Raw(raw), tmp_path / "crop", Preprocess(dtype="int16", crop=(2, 4, 8), fields=KIND))
    assert np.array_equal(rows_of(tmp_path / "crop")["image"][0], values(0)[1:3, 1:5])
    run(Raw(raw), tmp_path / "pad", Preprocess(dtype="int16", pad=(6, 8, 8), fields={"image": {"kind": "volume", "fill": -1024}}))
    padded = rows_of(tmp_path / "pad")["image"][0]
    assert np.array_equal(padded[1:5, 1:7], values(0))
    assert (padded[0] == -1024).all()
    with pytest.raises(OptionError, match="--resize: volumes are cropped and padded"):
        run(Raw(raw), tmp_path / "out", Preprocess(dtype="int16", resize=8, crop=8, fields=KIND))
    write(tmp_path / "pictures", {"a.png": picture(0)})
    with pytest.raises(OptionError, match="2x4x8: three sides are for volumes"):
        run(Raw(tmp_path / "pictures"), tmp_path / "out", Preprocess(crop=(2, 4, 8)))


def test_windows_and_normalisation_of_volumes(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write(raw, {"a.npy": npy(values(0)), "b.npy": npy(values(1))})
    run(Raw(raw), tmp_path / "out", Preprocess(range=(-1000, 2000), fields=KIND))
    found = rows_of(tmp_path / "out")["image"]
    assert found.dtype == np.uint8
    assert np.abs(found[0] - (values(0) + 1000.0) / 3000 * 255).max() <= 0.5001
    with pytest.raises(DecodeError):
        run(Raw(raw), tmp_path / "bytes", Preprocess(fields=KIND))
    run(Raw(raw), tmp_path / "counts", Preprocess(dtype="float32", scale="none", fields=KIND))
    assert np.array_equal(rows_of(tmp_path / "counts")["image"][1], values(1))


def test_volumes_with_channels_and_one_that_has_none(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write(raw, {f"{i}.npy": npy(values(i, (4, 6, 8, 2))) for i in range(3)})
    asked = Preprocess(dtype="int16", fields=KIND)
    run(Raw(raw), tmp_path / "out", asked)
    assert field_of(tmp_path / "out").shape == (2, 4, 6, 8)
    assert np.array_equal(rows_of(tmp_path / "out")["image"][1], np.moveaxis(values(1, (4, 6, 8, 2)), -1, 0))
    write(raw, {"3.npy": npy(values(3))})
    report = run(Raw(raw), tmp_path / "out", asked, max_rejects=1)
    assert (report.samples, report.rejects) == (3, 1)


def test_the_config_of_volumes_builds_them_again_and_datasets_of_them_are_merged(tmp_path: Path) -> None:
    raw, outs = tmp_path / "raw", [tmp_path / name for name in ("one", "two", "merged")]
    write(raw, {f"images/{i}.npy": npy(values(i)) for i in range(3)})
    write(raw, {f"masks/{i}.npy": npy((values(i) > 0).astype(np.uint8)) for i in range(3)})
    words = ["build", str(raw), str(outs[0]), "--dtype", "int16", "--crop", "2x4x4", "--field", "image:kind=volume,fill=-9", "--json"]
    done = [CliRunner().invoke(program, words)]
    config = CliRunner().invoke(program, ["info", str(outs[0]), "--config"])
    (tmp_path / "config.json").write_text(config.stdout)
    done.append(CliRunner().invoke(program, ["build", str(raw), str(outs[1]), "--config", str(tmp_path / "config.json")]))
    done.append(CliRunner().invoke(program, ["build", str(outs[0]), str(outs[2])]))
    assert [result.exit_code for result in (*done, config)] == [0, 0, 0, 0], [result.output for result in done]
    assert dataset(outs[0]) == dataset(outs[1])
    assert "--crop 2x4x4" in done[1].output
    first, merged = rows_of(outs[0]), rows_of(outs[2])
    assert all(np.array_equal(first[name], merged[name]) for name in first)


def double(volume: Any) -> Any:
    """A step that samples a volume of any size anew: every second value of what is there, to (2, 3, 4)."""
    return np.ascontiguousarray(volume[::2, ::2, ::2][:2, :3, :4])


def test_a_transform_gets_volumes_whole_and_says_their_size(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write(raw, {"a.npy": npy(values(0)), "b.npy": npy(values(1, (5, 7, 9)))})
    asked = Preprocess(dtype="int16", transform=f"{__name__}:double", transform_shape=(2, 3, 4), fields=KIND)
    run(Raw(raw), tmp_path / "out", asked)
    assert np.array_equal(rows_of(tmp_path / "out")["image"][1], values(1, (5, 7, 9))[::2, ::2, ::2][:2, :3, :4])
    with pytest.raises(OptionError, match=r"expected an array of int16 or float32, \(9, 3, 4\) \(depth, height, width\)"):
        run(Raw(raw), tmp_path / "wrong", Preprocess(dtype="int16", transform=f"{__name__}:double", transform_shape=(9, 3, 4), fields=KIND))


def test_pages_of_a_tiff_are_a_volume_where_all_frames_are_taken(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    planes = [np.random.default_rng(i).integers(0, 60000, (3, 6, 8)).astype(np.uint16) for i in range(2)]
    write(raw, {f"{i}.tif": pages(planes[i]) for i in range(2)})
    run(Raw(raw), tmp_path / "out", Preprocess(dtype="uint16", frames="all"))
    assert np.array_equal(rows_of(tmp_path / "out")["image"], planes)
    assert field_of(tmp_path / "out").meaning == "volume"
    report = run(Raw(raw), tmp_path / "first", Preprocess(dtype="uint16", mode="gray"))
    assert report.counts["more-frames"] == 2
    assert any("2 images of several frames, of which the first was taken (--frames all" in line for line in build_lines(report))


def test_labels_of_volumes_are_cut_as_these_and_keep_their_ids(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    labels = [np.random.default_rng(i).choice([0, 3, 200], (4, 6, 8)).astype(np.float32) for i in range(3)]
    write(raw, {f"imagesTr/{i}.npy": npy(values(i)) for i in range(3)})
    write(raw, {f"labelsTr/{i}.npy": npy(labels[i]) for i in range(3)})
    fields = {"image": {"kind": "volume", "fill": -5}}
    run(Raw(raw), tmp_path / "out", Preprocess(dtype="int16", crop=(2, 8, 4), fields=fields))
    rows = rows_of(tmp_path / "out")
    assert rows["label"].dtype == np.uint8
    assert np.array_equal(rows["label"][:, :, 1:7], [label[1:3, :, 2:6] for label in labels])
    assert np.array_equal(rows["image"][:, :, 1:7], [values(i)[1:3, :, 2:6] for i in range(3)])
    assert (rows["label"][:, :, 0] == 0).all()
    assert (rows["image"][:, :, 0] == -5).all()
    assert field_of(tmp_path / "out", "label").meaning == "volume"
    assert field_of(tmp_path / "out", "label").scale == 1
    write(raw, {"labelsTr/1.npy": npy(labels[1] + 100)})
    report = run(Raw(raw), tmp_path / "out", Preprocess(dtype="int16", crop=(2, 8, 4), fields=fields), max_rejects=1)
    assert (report.samples, report.reject_reasons) == (2, {"value-range": 1})
    wide = {**fields, "label": {"dtype": "int16"}}
    run(Raw(raw), tmp_path / "wide", Preprocess(dtype="int16", crop=(2, 8, 4), fields=wide))
    assert rows_of(tmp_path / "wide")["label"].max() == 300
    assert verify(tmp_path / "wide").ok


def test_names_with_two_extensions_are_volumes_and_pair_with_those_of_one(tmp_path: Path) -> None:
    write(tmp_path / "flat", {"a.nii.gz": b"", "b.NII.GZ": b"", "c.gz": b"", "d.nii": b"", "notes.txt": b""})
    scan = open_source([str(tmp_path / "flat")], SourceOptions()).scan()
    assert list(scan.keys) == [b"a.nii.gz", b"b.NII.GZ", b"d.nii"]
    assert (scan.parts, scan.left_out) == ((("image", "volume"),), {"extension .gz": 1, "extension .txt": 1})
    write(tmp_path / "task", {"imagesTr/a.nii.gz": b"", "labelsTr/a.nii": b""})
    scan = open_source([str(tmp_path / "task")], SourceOptions()).scan()
    assert scan.parts == (("image", "volume"), ("label", "mask"))
    assert scan.keys[0].beside == (b"labelsTr/a.nii",)


def test_nifti_is_recognised_alone_and_in_pairs(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    for i in range(3):
        for name, array in ((f"flat/{i}.nii.gz", values(i)), (f"task/imagesTr/{i}.nii.gz", values(i)), (f"task/labelsTr/{i}.nii.gz", values(i) % 3)):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array.transpose(2, 1, 0).astype(np.int16), np.eye(4)), path)
    asked = Preprocess(dtype="int16", orientation="ignore")
    run(Raw(tmp_path / "flat"), tmp_path / "one", asked)
    assert np.array_equal(rows_of(tmp_path / "one")["image"], [values(i) for i in range(3)])
    run(Raw(tmp_path / "task"), tmp_path / "two", asked)
    rows = rows_of(tmp_path / "two")
    assert np.array_equal(rows["image"], [values(i) for i in range(3)])
    assert np.array_equal(rows["label"], [values(i) % 3 for i in range(3)])
    assert [(s.name, s.stop) for s in Reader(tmp_path / "two").index.splits] == [("train", 3)]


def series(folder: Path, volume: Any) -> None:
    """A folder of slices of (D, H, W) int16, whose names are in another order than their positions."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    folder.mkdir(parents=True)
    whole = generate_uid()
    for z, plane in enumerate(volume):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = CTImageStorage, generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        made = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        made.SOPClassUID, made.SOPInstanceUID, made.SeriesInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID, whole
        made.Rows, made.Columns = plane.shape
        made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
        made.BitsAllocated = made.BitsStored = 16
        made.HighBit, made.PixelRepresentation = 15, 0
        made.RescaleSlope, made.RescaleIntercept = 1, -1024
        made.ImagePositionPatient, made.ImageOrientationPatient = [0, 0, 2.0 * z], [1, 0, 0, 0, 1, 0]
        made.InstanceNumber = z + 1
        made.PixelData = (plane.astype(np.int32) + 1024).astype("<u2").tobytes()
        pydicom.dcmwrite(folder / f"{(7 * z) % 5}.dcm", made, enforce_file_format=True)


def test_a_folder_of_slices_is_a_sample_in_hounsfield_units(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    for i, name in enumerate(("ill/a", "well/b", "well/deep/c")):
        series(raw / name, values(i))
    asked = Preprocess(dtype="int16")
    run(Raw(raw), out, asked)
    rows = rows_of(out)
    assert np.array_equal(rows["image"], [values(i) for i in range(3)])
    assert rows["label"].tolist() == [0, 1, 1]
    assert keys(out) == [b"ill/a/", b"well/b/", b"well/deep/c/"]
    assert run(Raw(raw), out, asked).decoded == 0
    less = Raw(raw, exclude=["*/4.dcm"])
    run(less, tmp_path / "less", asked)
    assert np.array_equal(rows_of(tmp_path / "less")["image"], [np.delete(values(i), 2, 0) for i in range(3)])
    assert run(less, tmp_path / "less", asked).decoded == 0
    (raw / "well/b/4.dcm").unlink()
    with pytest.raises(OptionError, match=r"2 sizes .* from 3 x 6 x 8 to 4 x 6 x 8"):
        run(Raw(raw), out, asked)
    with pytest.raises(SourceError, match="holds slices of a series itself: expected a folder for each series"):
        run(Raw(raw / "ill/a"), tmp_path / "no", asked)


def test_series_pair_with_masks_of_the_same_name(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for i in range(2):
        series(raw / f"images/case{i}", values(i))
        write(raw, {f"masks/case{i}.npy": npy((values(i) > 0).astype(np.uint8))})
    run(Raw(raw), tmp_path / "out", Preprocess(dtype="int16", crop=4))
    rows = rows_of(tmp_path / "out")
    assert np.array_equal(rows["mask"], rows["image"] > 0)
    report = run(Raw(raw, exclude=["images/case0"]), tmp_path / "less", Preprocess(dtype="int16", crop=4))
    assert keys(tmp_path / "less") == [b"images/case1/"]
    assert report.samples == 1


def test_pages_with_masks_of_pages(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write(raw, {f"images/{i}.tif": pages(np.abs(values(i)).astype(np.uint16)) for i in range(2)})
    write(raw, {f"masks/{i}.tif": pages((values(i) > 0).astype(np.uint8)) for i in range(2)})
    run(Raw(raw), tmp_path / "out", Preprocess(dtype="uint16", frames="all"))
    rows = rows_of(tmp_path / "out")
    assert np.array_equal(rows["image"], [np.abs(values(i)) for i in range(2)])
    assert np.array_equal(rows["mask"], [values(i) > 0 for i in range(2)])


@pytest.mark.parametrize("engine", ["mmap", "pread", "resident"])
@pytest.mark.parametrize(
    ("source", "fill", "options"),
    [
        ("int16", -1024, {"dtype": "int16"}),
        ("int16", -1000, {"dtype": "float32", "normalize": Normalize((5.0,), (3.0,))}),
        ("int16", 0, {"dtype": "float16", "normalize": Normalize((5.0,), (3.0,))}),
        ("uint8", 200, {"dtype": "bfloat16", "normalize": Normalize((0.3,), (0.2,))}),
        ("uint8", 7, {"dtype": "uint16"}),
        ("uint8", 7, {"dtype": "uint8", "normalize": Normalize((0.3,), (0.2,))}),
        ("uint16", 999, {"dtype": "float64"}),
        ("uint16", 99, {"dtype": "uint8", "depth16": "scale"}),
        ("uint16", 999, {"dtype": "float32", "scale": "none"}),
        ("uint16", 999, {"dtype": "uint16"}),
        ("int16", 1, {"dtype": "float32", "range": (-1000, 2000)}),
        ("uint8", 9, {"dtype": "float32", "range": (-1000, 2000)}),
        ("float32", 5, {"dtype": "float32"}),
        ("channels", 60, {"dtype": "float32", "normalize": Normalize((0.3, 0.1), (0.2, 0.4))}),
    ],
)
def test_beyond_a_patch_lies_what_lies_around_a_volume(tmp_path: Path, engine: str, source: str, fill: int, options: dict[str, Any]) -> None:
    shape = (4, 6, 8, 2) if source == "channels" else (4, 6, 8)
    data = np.abs(values(0, shape)) % 250 if source in ("uint8", "channels") else values(0, shape)
    write(tmp_path / "raw", {f"imagesTr/{i}.npy": npy(data.astype("uint8" if source == "channels" else source)) for i in range(2)})
    write(tmp_path / "raw", {f"labelsTr/{i}.npy": npy(np.ones((4, 6, 8), np.uint8)) for i in range(2)})
    asked = Preprocess(pad=(6, 8, 10), fields={"image": {"kind": "volume", "fill": fill}, "label": {"fill": 9}}, **options)
    run(Raw(tmp_path / "raw"), tmp_path / "out", asked)
    ds = MMapShardDataset(tmp_path / "out", "train", engine="mmap" if engine == "resident" else engine)
    if engine == "resident":
        ds = ds.to_device("cpu")
    shown = 0
    for epoch in range(6):
        augment = Augment(crop=(6, 8, 10), padding=3, flip=(0.5, 0.5, 0.5))
        loader = ShardLoader(ds, 2, augment=augment, shuffle=False, num_workers=0)
        loader.set_epoch(epoch)
        image, label = next(iter(loader))
        corner = ds[0][0][..., :1, :1, :1]
        beyond = label == 9
        shown += int(beyond.sum())
        assert torch.equal(label == 9, ~(label == 1))
        around = image.movedim(-4, -1)[beyond] if source == "channels" else image[beyond]
        assert torch.equal(around, corner.reshape(1, -1).expand(len(around), -1) if source == "channels" else corner.reshape(-1).expand(len(around)))
    assert shown > 3 * (480 - 192)


def test_means_of_volumes_are_as_many_as_their_channels_and_a_fill_is_one_of_the_dtype(tmp_path: Path) -> None:
    write(tmp_path / "raw", {f"{i}.npy": npy(values(i, (4, 6, 8, 2))) for i in range(2)})
    with pytest.raises(OptionError, match="mean and std have 1 value, volumes have 2 channels"):
        run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(dtype="float32", normalize=Normalize((5.0,), (3.0,)), fields=KIND))
    with pytest.raises(OptionError, match=r"mean and std have 1 value, --mode rgb has 3 channels: .*of volumes without channels, add --mode gray"):
        Preprocess(dtype="float32", normalize=Normalize((5.0,), (3.0,)))
    for fill, dtype in ((-1, "uint8"), (256, "uint8"), (40000, "int16")):
        with pytest.raises(OptionError, match=f"fill {fill} is no value of {dtype}, which holds"):
            run(Raw(tmp_path / "raw"), tmp_path / "out", Preprocess(dtype=dtype, pad=9, fields={"image": {"kind": "volume", "fill": fill}}))
