"""Writes and reads FFCV's files: `python -m tests.beton write|read '{"path": ...}'`, as numba, in the process where it compiled, ends with errors."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from PIL import Image

FIELDS = ("image", "label", "weight", "vector")


def photo(seed: int, size: tuple[int, int] = (24, 18)) -> Any:
    """A smooth picture (H, W, 3), which JPEG changes a little; `size` is (width, height)."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))


def rows(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """A row for each size, (width, height), of FIELDS and of one that is no number."""
    vectors = np.random.default_rng(0).normal(size=(len(sizes), 3)).astype("f4")
    return [{"image": photo(i, s), "label": i % 4, "weight": i / 7, "vector": vectors[i], "note": {"i": i}} for i, s in enumerate(sizes)]


def write(path: str, sizes: list[tuple[int, int]], how: dict[str, Any]) -> None:
    from ffcv.fields import FloatField, IntField, JSONField, NDArrayField, RGBImageField
    from ffcv.writer import DatasetWriter

    kinds = (RGBImageField(**how), IntField(), FloatField(), NDArrayField(np.dtype("<f4"), (3,)), JSONField())
    fields = dict(zip((*FIELDS, "note"), kinds, strict=True))
    DatasetWriter(path, fields, num_workers=2).from_indexed_dataset([tuple(row[name] for name in fields) for row in rows(sizes)], chunksize=7)


def read(path: str, size: int | None) -> None:
    """Save what FFCV's own loader gives of FIELDS, the images (N, H, W, C), as PATH.npz; all but images as it gives them unasked."""
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption

    decoder = CenterCropRGBImageDecoder((size, size), ratio=224 / 256) if size else SimpleRGBImageDecoder()
    loader = Loader(path, 10, 1, order=OrderOption.SEQUENTIAL, drop_last=False, pipelines={"image": [decoder], "note": None})
    batches = [[torch.as_tensor(part).numpy().copy() for part in batch] for batch in loader]
    np.savez(f"{path}.npz", **dict(zip(FIELDS, map(np.concatenate, zip(*batches, strict=True)), strict=True)))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](**json.loads(sys.argv[2]))
