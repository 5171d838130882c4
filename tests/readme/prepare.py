"""What a reader of the README would have: `python -m tests.readme.prepare NAME` makes it in the working folder, as the library does that wrote it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog")


def pictures() -> list[tuple[Any, int]]:
    """(pixels (32, 48, 3) of uint8, class) of 24 samples, by class: what every maker of a library writes."""
    rng = np.random.default_rng(7)
    return [(rng.integers(0, 256, (32, 48, 3), np.uint8), i // 12) for i in range(24)]


def planes() -> dict[str, Any]:
    """The same as two arrays: image (24, 3, 32, 48) and label (24,)."""
    images, labels = zip(*pictures(), strict=True)
    return {"image": np.stack(images).transpose(0, 3, 1, 2).copy(), "label": np.array(labels)}


def raw(seed: int = 0, folder: str = "raw") -> None:
    """Two classes of pictures that differ in size."""
    rng = np.random.default_rng(seed)
    for name in CLASSES:
        (Path(folder) / name).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 256, (260 + 10 * i, 300, 3), np.uint8)
            Image.fromarray(pixels).save(Path(folder) / name / f"{i}.png")


def compiled(seed: int, out: str) -> None:
    import mmcompile

    raw(seed, f"{out}-raw")
    mmcompile.build(f"{out}-raw", out, preprocess=mmcompile.Preprocess(resize=256, crop=224), workers=1)


def rows() -> None:
    Path("rows.txt").write_text("0\n3\n7\n")


def bars() -> None:
    """Two symbols, a bar for each day from June 2022 to May 2024."""
    days = np.arange("2022-06-01", "2024-06-01", dtype="datetime64[D]")
    Path("bars").mkdir()
    for symbol in ("A", "B"):
        lines = [f"{day},{i},{i + 2},{i - 1},{i + 1},{10 * i}\n" for i, day in enumerate(days)]
        Path(f"bars/{symbol}.csv").write_text("".join(["ts,open,high,low,close,volume\n", *lines]))


def cifar(name: str, rows: int) -> None:
    """A file of CIFAR-10's binary version: a byte for the class, 3 x 32 x 32 for the pixels."""
    np.random.default_rng(rows).integers(0, 10, (rows, 3073), np.uint8).tofile(name)


def secret() -> None:
    """For a machine without openssl; where there is one the README's own line writes another."""
    Path("secret.key").write_bytes(b"of a test, and of no one else")


def image_folder() -> None:
    for i, (pixels, label) in enumerate(pictures()):
        (Path("photos") / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(Path("photos") / CLASSES[label] / f"{i:02}.png")


def ffcv() -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter("train.beton", fields, num_workers=1).from_indexed_dataset(pictures())


def mds() -> None:
    from streaming import MDSWriter

    with MDSWriter(out="mds", columns={"image": "png", "label": "int"}, size_limit=1 << 16) as writer:
        for pixels, label in pictures():
            writer.write({"image": Image.fromarray(pixels), "label": label})


def litdata() -> None:
    import torch
    from litdata.streaming.writer import BinaryWriter

    Path("optimized").mkdir()
    writer = BinaryWriter("optimized", chunk_bytes="64KB")
    for i, (image, label) in enumerate(zip(*planes().values(), strict=True)):
        writer.add_item(i, {"image": torch.from_numpy(image), "label": int(label)})
    writer.done()
    writer.merge()


def tensordict() -> None:
    import torch
    from tensordict import TensorDict

    TensorDict({name: torch.from_numpy(array) for name, array in planes().items()}, [24]).memmap("td")


def mmap_ninja() -> None:
    from mmap_ninja import numpy as np_ninja

    for name, array in planes().items():
        np_ninja.from_ndarray(f"ninja/{name}", array)


def hugging_face() -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    rows = [{"image": Image.fromarray(pixels), "label": label} for pixels, label in pictures()]
    datasets.Dataset.from_list(rows, features=features).save_to_disk("saved")


def webdataset() -> None:
    from webdataset import ShardWriter

    Path("tars").mkdir()
    with ShardWriter("tars/shard-%03d.tar", maxcount=10, verbose=0) as writer:
        for i, (pixels, label) in enumerate(pictures()):
            writer.write({"__key__": f"{i:03}", "png": Image.fromarray(pixels), "cls": label})


MAKERS: dict[str, Callable[[], None]] = {
    "raw/": raw,
    "out1/": lambda: compiled(1, "out1"),
    "out2/": lambda: compiled(2, "out2"),
    "rows.txt": rows,
    "bars/": bars,
    "data_batch_1.bin": lambda: cifar("data_batch_1.bin", 5),
    "data_batch_2.bin": lambda: cifar("data_batch_2.bin", 4),
    "test_batch.bin": lambda: cifar("test_batch.bin", 3),
    "secret.key": secret,
    "photos/": image_folder,
    "train.beton": ffcv,
    "mds/": mds,
    "optimized/": litdata,
    "td/": tensordict,
    "ninja/": mmap_ninja,
    "saved/": hugging_face,
    "tars/": webdataset,
}


if __name__ == "__main__":
    try:
        MAKERS[sys.argv[1]]()
    except BaseException:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        raise
