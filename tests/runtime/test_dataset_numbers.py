"""The numbers of a sample: ToTensor's and Normalize's, bit for bit, however the rows are stored and however they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile.runtime.dataset import MMapShardDataset
from tests.support import make_dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Every 8-bit value in every channel, in a shape whose rows are no multiple of a vector's width.
EIGHT = np.stack([np.random.default_rng(s).permutation(np.repeat(np.arange(256, dtype=np.uint8), 3)).reshape(3, 16, 16) for s in range(5)])[
    :, :, :15, :13
]
SIXTEEN = np.random.default_rng(1).integers(0, 65536, (5, 3, 15, 13), dtype=np.uint16)


def formula(x: np.ndarray[Any, Any], scale: float, normalize: bool, work: Any = np.float32) -> np.ndarray[Any, Any]:
    out = x.astype(work) / work(scale)
    if normalize:
        mean, std = (np.array(v, work)[:, None, None] for v in (MEAN, STD))
        out = (out - mean) / std
    assert out.dtype == work
    return out


def equal(ds: MMapShardDataset, expected: torch.Tensor) -> None:
    """Sample by sample, in a batch, and as DataLoader fetches them: the same bits."""
    assert ds.dtype == expected.dtype
    n = len(expected)
    for got in (torch.stack([ds[i] for i in range(n)]), ds[:], torch.stack(ds.__getitems__(list(range(n))))):
        assert got.dtype == expected.dtype
        assert got.contiguous().view(torch.uint8).numpy().tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize(("images", "scale"), [(EIGHT, 255), (SIXTEEN, 65535)], ids=["8 bit", "16 bit"])
def test_deferred_normalisation_equals_the_formula(tmp_path: Path, images: Any, scale: int, layout: str, engine: str) -> None:
    make_dataset(tmp_path, images, layout=layout, normalize=(MEAN, STD), shards=(2, 3))
    expected = torch.from_numpy(formula(images, scale, True))
    equal(MMapShardDataset(tmp_path, engine=engine), expected)
    equal(MMapShardDataset(tmp_path, engine=engine, dtype=torch.float32), expected)
    equal(MMapShardDataset(tmp_path, engine=engine, dtype=torch.float16), expected.half())
    equal(MMapShardDataset(tmp_path, engine=engine, dtype=torch.bfloat16), expected.bfloat16())
    equal(MMapShardDataset(tmp_path, engine=engine, dtype=torch.float64), torch.from_numpy(formula(images, scale, True, np.float64)))
    stored = torch.from_numpy(images)
    equal(MMapShardDataset(tmp_path, engine=engine, dtype=stored.dtype), stored)
    equal(MMapShardDataset(tmp_path, engine=engine, crop=(7, 5)), expected[:, :, 4:11, 4:9])


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_without_normalisation_a_float_dtype_is_the_unit_range(tmp_path: Path, layout: str) -> None:
    make_dataset(tmp_path / "unit", EIGHT, layout=layout)
    equal(MMapShardDataset(tmp_path / "unit"), torch.from_numpy(EIGHT))
    equal(MMapShardDataset(tmp_path / "unit", dtype=torch.float32), torch.from_numpy(formula(EIGHT, 255, False)))
    make_dataset(tmp_path / "counts", EIGHT, layout=layout, scale=1.0)
    equal(MMapShardDataset(tmp_path / "counts", dtype=torch.float32), torch.from_numpy(EIGHT.astype(np.float32)))


def test_stored_floats_are_given_as_they_are_or_cast_once(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((4, 1, 5, 3))
    make_dataset(tmp_path / "64", values)
    make_dataset(tmp_path / "32", values.astype(np.float32))
    make_dataset(tmp_path / "16", values.astype(np.float16))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        equal(MMapShardDataset(tmp_path / "64", dtype=dtype), torch.from_numpy(values).to(dtype))
        equal(MMapShardDataset(tmp_path / "32", dtype=dtype), torch.from_numpy(values.astype(np.float32)).to(dtype))
    equal(MMapShardDataset(tmp_path / "16"), torch.from_numpy(values.astype(np.float16)))
    bits = torch.from_numpy(values).bfloat16()
    make_dataset(tmp_path / "brain", bits.view(torch.uint16).numpy(), dtype="bfloat16")
    equal(MMapShardDataset(tmp_path / "brain"), bits)
    equal(MMapShardDataset(tmp_path / "brain", dtype=torch.float32), bits.float())
    with pytest.raises(ValueError, match="stored as float32"):
        MMapShardDataset(tmp_path / "32", dtype=torch.uint8)


def test_numbers_are_the_same_however_they_are_stored(tmp_path: Path) -> None:
    """8-bit values, the same as unit floats of two widths, and both with their normalisation still to come."""
    unit = EIGHT / 255.0
    for name, images in (("8", EIGHT), ("32", unit.astype(np.float32)), ("64", unit)):
        make_dataset(tmp_path / name, images, normalize=(MEAN, STD))
        make_dataset(tmp_path / f"{name} plain", images)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for name in ("8", "32", "64"):
            equal(MMapShardDataset(tmp_path / name, dtype=dtype), torch.from_numpy(formula(EIGHT, 255, True)).to(dtype))
            equal(MMapShardDataset(tmp_path / f"{name} plain", dtype=dtype), torch.from_numpy(formula(EIGHT, 255, False)).to(dtype))
    double = torch.from_numpy(formula(EIGHT, 255, True, np.float64))
    equal(MMapShardDataset(tmp_path / "64"), double)  # as stored
    equal(MMapShardDataset(tmp_path / "8", dtype=torch.float64), double)
    assert (double.float() != torch.from_numpy(formula(EIGHT, 255, True))).any()  # what rounding once too late would give


def test_the_default_dtype_of_torch_changes_nothing(tmp_path: Path) -> None:
    make_dataset(tmp_path, EIGHT, normalize=(MEAN, STD))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        equal(MMapShardDataset(tmp_path), torch.from_numpy(formula(EIGHT, 255, True)))
    finally:
        torch.set_default_dtype(before)


def test_computed_samples_are_fresh(tmp_path: Path) -> None:
    make_dataset(tmp_path, EIGHT, normalize=(MEAN, STD))
    ds = MMapShardDataset(tmp_path)
    ds[0].zero_()
    equal(ds, torch.from_numpy(formula(EIGHT, 255, True)))


def test_equals_torchvision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    image = pytest.importorskip("PIL.Image")
    from torchvision import transforms
    from torchvision.transforms import v2

    make_dataset(tmp_path, EIGHT, normalize=(MEAN, STD))
    pictures = [image.fromarray(np.ascontiguousarray(x.transpose(1, 2, 0))) for x in EIGHT]
    peer = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    equal(MMapShardDataset(tmp_path), torch.stack([peer(p) for p in pictures]))
    for crop in (6, 7, (8, 13), (15, 4)):
        cut = transforms.Compose([transforms.CenterCrop(crop), peer])
        equal(MMapShardDataset(tmp_path, crop=crop), torch.stack([cut(p) for p in pictures]))
    raw = MMapShardDataset(tmp_path, dtype=torch.uint8, transform=v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]))
    torch.testing.assert_close(raw[3], peer(pictures[3]), rtol=1e-5, atol=1e-6)  # v2.ToDtype multiplies by 1 / 255: not the same bits
