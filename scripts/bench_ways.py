"""Hides how each library keeps decoded images and is read with its own best settings; `bench_peers.py` runs each way in a process of its own.

A way says how it builds from a folder of JPEG files, opens, and which settings for an epoch are worth a try: all of them are tried, and the fastest
on this machine is taken.  All decode in as many processes as there are cores and hold raw pixels without compression, so that rows are equal.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_child import serve
from bench_results import Batches, Rows, photo_paths, touched
from PIL import Image
from torch.utils.data import DataLoader, Dataset

#: An epoch with some settings, as often as it is called; what makes one.
Epoch = Callable[[], Batches]
Settings = dict[str, Callable[[], Epoch]]
SHARD_BYTES = 64 << 20
_WRITE_BATCH = 64


def decoded(item: tuple[Path, int]) -> tuple[np.ndarray, int]:
    path, label = item
    with Image.open(path) as file:
        return np.array(file.convert("RGB")), label


class Pixels(Dataset):
    """(H, W, C) pixels and labels of a folder of files."""

    def __init__(self, raw: Path) -> None:
        self.items = photo_paths(raw)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return decoded(self.items[i])


def batches_of(raw: Path, workers: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Decoded (N, C, H, W) and labels in order, by worker processes: for writers that have none."""
    for images, labels in DataLoader(Pixels(raw), _WRITE_BATCH, num_workers=workers):
        yield np.ascontiguousarray(images.numpy().transpose(0, 3, 1, 2)), labels.numpy()


def loaders(make: Callable[[int], Any], workers: int, pick: Callable[[Any], tuple[Any, Any]] = tuple) -> Settings:
    """Settings of a DataLoader: 0, 1, or as many worker processes as there are cores."""

    def settled(count: int) -> Callable[[], Epoch]:
        def made() -> Epoch:
            loader = make(count)
            return lambda: map(pick, loader)

        return made

    return {f"{count} workers": settled(count) for count in sorted({0, 1, workers})}


def both(batch: Any) -> tuple[Any, Any]:
    return batch["image"], batch["label"]


class Way:
    """What all have: `library` is the module that must be there, `mixing` how far a shuffled epoch mixes.

    ordered: whether an epoch that is not shuffled keeps the order of the rows, whatever the number of workers.
    """

    library, mixing, ordered = "", "all rows", True

    def build(self, raw: Path, out: Path, workers: int) -> None:
        raise NotImplementedError

    def first(self, out: Path) -> Any:
        """Open and read row 0."""
        raise NotImplementedError

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        raise NotImplementedError

    def chw(self, images: Any) -> Any:
        return images


class InMemory(Way):
    """The limit, an array in memory: in sequence summed where it lies, which is what touching costs; shuffled rows are taken into one buffer."""

    library = "numpy"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        parts = list(batches_of(raw, workers))
        out.mkdir()
        np.save(out / "image.npy", np.concatenate([images for images, _ in parts]))
        np.save(out / "label.npy", np.concatenate([labels for _, labels in parts]))

    def first(self, out: Path) -> Any:
        return np.load(out / "image.npy")[0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        def made() -> Epoch:
            images, labels = np.load(out / "image.npy"), np.load(out / "label.npy")
            buffer = np.empty((batch, *images.shape[1:]), np.uint8)

            def epoch() -> Batches:
                order = np.random.default_rng().permutation(len(images))
                for at in range(0, len(images), batch):
                    keys = order[at : at + batch]
                    if shuffled:
                        yield np.take(images, keys, axis=0, out=buffer[: len(keys)], mode="clip"), labels[keys]
                    else:
                        yield images[at : at + batch], labels[at : at + batch]

            return epoch

        return {"np.take(out=)" if shuffled else "slices": made}


class Ours(Way):
    """ShardLoader with 1 thread or as many as cores; in sequence also views of the maps, as others' slices are.

    FRUGAL holds the fewest batches ahead: what memory costs depends on that alone.
    """

    library = "mmcompile"
    FRUGAL = "ShardLoader, 1 thread, prefetch_factor=1"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        mmcompile = importlib.import_module("mmcompile")
        mmcompile.build(raw, out, preprocess=mmcompile.Preprocess(), options=mmcompile.BuildOptions(workers=workers))

    def first(self, out: Path) -> Any:
        return importlib.import_module("mmcompile").MMapShardDataset(out)[0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        mmcompile = importlib.import_module("mmcompile")
        ds = mmcompile.MMapShardDataset(out)

        def threads(count: int, ahead: int = 2) -> Callable[[], Epoch]:
            def made() -> Epoch:
                loader = mmcompile.ShardLoader(ds, batch, shuffle=shuffled, num_workers=count, prefetch_factor=ahead)
                return lambda: loader

            return made

        def views() -> Epoch:
            windows = ds.windows(min(batch, len(ds)), stride=batch)

            def epoch() -> Batches:
                yield from (windows[i] for i in range(len(windows)))
                if len(ds) % batch:
                    yield ds[len(windows) * batch :]

            return epoch

        found = {f"ShardLoader, {count} thread{'s' * (count > 1)}": threads(count) for count in sorted({1, workers})}
        found[self.FRUGAL] = threads(1, ahead=1)
        return found if shuffled else found | {"views: windows(batch, stride=batch)": views}


class ImageFolder(Way):
    """torchvision's ImageFolder with its own loader (Pillow) and PILToTensor: it decodes in each epoch."""

    library = "torchvision"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        out.symlink_to(raw.resolve())

    def _dataset(self, out: Path) -> Any:
        torchvision = importlib.import_module("torchvision")
        return torchvision.datasets.ImageFolder(str(out), importlib.import_module("torchvision.transforms").PILToTensor())

    def first(self, out: Path) -> Any:
        return self._dataset(out)[0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        dataset = self._dataset(out)
        return loaders(lambda n: DataLoader(dataset, batch, shuffle=shuffled, num_workers=n, persistent_workers=n > 0), workers)


class TensorDicts(Way):
    """A memory-mapped TensorDict: slices of it in sequence, which are views; by a tensor of indices at random, the fastest that it has."""

    library = "tensordict"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        kind, n, at, held = importlib.import_module("tensordict").TensorDict, len(photo_paths(raw)), 0, None
        for images, labels in batches_of(raw, workers):
            part = kind({"image": torch.from_numpy(images), "label": torch.from_numpy(labels)}, [len(labels)])
            held = part[0].expand(n).memmap_like(str(out)) if held is None else held
            held[at : at + len(labels)] = part
            at += len(labels)

    def _held(self, out: Path) -> Any:
        return importlib.import_module("tensordict").TensorDict.load_memmap(str(out))

    def first(self, out: Path) -> Any:
        return self._held(out)[0]["image"]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        def indexed() -> Epoch:
            held = self._held(out)
            if shuffled:
                return lambda: (both(held[keys]) for keys in torch.randperm(len(held)).split(batch))
            return lambda: (both(held[at : at + batch]) for at in range(0, len(held), batch))

        def loader(count: int) -> DataLoader:
            more = {"num_workers": count, "persistent_workers": count > 0}
            return DataLoader(self._held(out), batch, shuffle=shuffled, collate_fn=_as_it_is, **more)

        return {"td[indices]" if shuffled else "td[slice]": indexed, **loaders(loader, workers, both)}


def _as_it_is(batch: Any) -> Any:
    return batch


class Ninja(Way):
    """mmap_ninja: numpy's slices and arrays of indices on one mapped array."""

    library = "mmap_ninja"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        ninja, labels = importlib.import_module("mmap_ninja.numpy"), list[int]()

        def rows() -> Iterator[np.ndarray]:
            for images, found in batches_of(raw, workers):
                labels.extend(found.tolist())
                yield from images

        out.mkdir()
        ninja.from_generator(str(out / "image"), sample_generator=rows(), batch_size=_WRITE_BATCH)
        ninja.from_ndarray(str(out / "label"), np.array(labels))

    def _open(self, out: Path) -> tuple[Any, Any]:
        ninja = importlib.import_module("mmap_ninja.numpy")
        return ninja.open_existing(str(out / "image")), ninja.open_existing(str(out / "label"))

    def first(self, out: Path) -> Any:
        return self._open(out)[0][0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        def made() -> Epoch:
            images, labels = self._open(out)

            def epoch() -> Batches:
                order = np.random.default_rng().permutation(len(images))
                for at in range(0, len(images), batch):
                    keys = order[at : at + batch] if shuffled else slice(at, at + batch)
                    yield np.asarray(images[keys]), np.asarray(labels[keys])

            return epoch

        return {"rows[indices]" if shuffled else "rows[slice]": made}


class Streaming(Way):
    """MosaicML Streaming, local, with its own shuffle and loader."""

    library, mixing = "streaming", "its own shuffle, py1e: within some shards"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        shape = ",".join(map(str, np.array(decoded(photo_paths(raw)[0])[0]).transpose(2, 0, 1).shape))
        columns = {"image": f"ndarray:uint8:{shape}", "label": "int"}
        with importlib.import_module("streaming").MDSWriter(out=str(out), columns=columns, size_limit=SHARD_BYTES) as writer:
            for images, labels in batches_of(raw, workers):
                for image, label in zip(images, labels.tolist(), strict=True):
                    writer.write({"image": image, "label": label})

    def first(self, out: Path) -> Any:
        return importlib.import_module("streaming").StreamingDataset(local=str(out), shuffle=False, batch_size=1)[0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        streaming = importlib.import_module("streaming")

        def loader(count: int) -> Any:
            dataset = streaming.StreamingDataset(local=str(out), shuffle=shuffled, batch_size=batch)
            return streaming.StreamingDataLoader(dataset, batch_size=batch, num_workers=count, persistent_workers=count > 0)

        return loaders(loader, workers, both)


class LitData(Way):
    """LitData: `optimize` with a worker for each core, its own loader and shuffle."""

    library, mixing, ordered = "litdata", "its own shuffle: within chunks", False

    def build(self, raw: Path, out: Path, workers: int) -> None:
        litdata = importlib.import_module("litdata")
        litdata.optimize(fn=_lit_item, inputs=photo_paths(raw), output_dir=str(out), num_workers=workers, chunk_bytes="64MB", verbose=False)

    def _dataset(self, out: Path, shuffled: bool) -> Any:
        return importlib.import_module("litdata").StreamingDataset(str(out), shuffle=shuffled)

    def first(self, out: Path) -> Any:
        return self._dataset(out, False)[0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        litdata = importlib.import_module("litdata")

        def loader(count: int) -> Any:
            return litdata.StreamingDataLoader(self._dataset(out, shuffled), batch_size=batch, num_workers=count, persistent_workers=count > 0)

        return loaders(loader, workers, both)


def _lit_item(item: tuple[Path, int]) -> dict[str, Any]:
    image, label = decoded(item)
    return {"image": torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), "label": label}


class HuggingFace(Way):
    """Hugging Face datasets: Arrow with Array3D, by arrays of indices, as numpy or torch.

    Both formats make int64 of all integers unless told the dtype, which is told for labels, too: there are few classes.
    """

    library = "datasets"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        hf, shape, cache = importlib.import_module("datasets"), decoded(photo_paths(raw)[0])[0].transpose(2, 0, 1).shape, f"{out}.cache"
        features = hf.Features({"image": hf.Array3D(shape, "uint8"), "label": hf.Value("int64")})
        kwargs = {"gen_kwargs": {"items": photo_paths(raw)}, "features": features, "cache_dir": cache}
        hf.Dataset.from_generator(_hf_rows, num_proc=workers, **kwargs).save_to_disk(str(out))
        shutil.rmtree(cache)

    def _open(self, out: Path, kind: str) -> Any:
        hf = importlib.import_module("datasets")
        hf.disable_progress_bars()
        return hf.load_from_disk(str(out)).with_format(kind, dtype=np.uint8 if kind == "numpy" else torch.uint8)

    def first(self, out: Path) -> Any:
        return self._open(out, "numpy")[0]

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        def settled(kind: str) -> Callable[[], Epoch]:
            def made() -> Epoch:
                held = self._open(out, kind)

                def epoch() -> Batches:
                    if not shuffled:
                        yield from map(both, held.iter(batch))
                        return
                    order = np.random.default_rng().permutation(len(held))
                    for at in range(0, len(order), batch):
                        yield both(held[order[at : at + batch]])

                return epoch

            return made

        return {f"format {kind}": settled(kind) for kind in ("numpy", "torch")}


def _hf_rows(items: list[tuple[Path, int]]) -> Iterator[dict[str, Any]]:
    for item in items:
        image, label = decoded(item)
        yield {"image": image.transpose(2, 0, 1), "label": label}


class WebDataset(Way):
    """WebDataset: tar files of .npy, local, with a shuffle buffer of 1,000 rows, and batches made in the workers."""

    library, mixing, ordered = "webdataset", "shards, and a buffer of 1,000 rows", False

    def build(self, raw: Path, out: Path, workers: int) -> None:
        out.mkdir()
        count, row = 0, 0
        with importlib.import_module("webdataset").ShardWriter(f"{out}/%06d.tar", maxsize=SHARD_BYTES, verbose=0) as writer:
            for images, labels in batches_of(raw, workers):
                for row, (image, label) in enumerate(zip(images, labels.tolist(), strict=True), count):
                    writer.write({"__key__": f"{row:09}", "image.npy": image, "cls": label})
                count = row + 1

    def _dataset(self, out: Path, shuffled: bool) -> Any:
        wds, urls = importlib.import_module("webdataset"), [str(path) for path in sorted(out.glob("*.tar"))]
        held = wds.WebDataset(urls, shardshuffle=len(urls) if shuffled else False, empty_check=False)
        return (held.shuffle(1000) if shuffled else held).decode().to_tuple("image.npy", "cls")

    def first(self, out: Path) -> Any:
        return next(iter(self._dataset(out, False)))

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        wds = importlib.import_module("webdataset")

        def loader(count: int) -> Any:
            held = self._dataset(out, shuffled).batched(batch)
            return wds.WebLoader(held, batch_size=None, num_workers=count, persistent_workers=count > 0)

        return loaders(loader, workers)


class FFCV(Way):
    """FFCV: raw pixels, in the page cache (os_cache), 1 thread or as many as cores.  Images come (N, H, W, C)."""

    library = "ffcv"

    def build(self, raw: Path, out: Path, workers: int) -> None:
        writer, fields = importlib.import_module("ffcv.writer"), importlib.import_module("ffcv.fields")
        out.mkdir()
        kinds = {"image": fields.RGBImageField(write_mode="raw"), "label": fields.IntField()}
        writer.DatasetWriter(str(out / "a.beton"), kinds, num_workers=workers).from_indexed_dataset(Pixels(raw))

    def _loader(self, out: Path, batch: int, shuffled: bool, workers: int) -> Any:
        loader, fields = importlib.import_module("ffcv.loader"), importlib.import_module("ffcv.fields")
        steps = importlib.import_module("ffcv.transforms")
        order = loader.OrderOption.RANDOM if shuffled else loader.OrderOption.SEQUENTIAL
        pipelines = {
            "image": [fields.rgb_image.SimpleRGBImageDecoder(), steps.ToTensor()],
            "label": [fields.basics.IntDecoder(), steps.ToTensor(), steps.Squeeze()],
        }
        return loader.Loader(
            str(out / "a.beton"), batch_size=batch, num_workers=workers, order=order, drop_last=False, os_cache=True, pipelines=pipelines
        )

    def first(self, out: Path) -> Any:
        return next(iter(self._loader(out, 1, False, 1)))

    def settings(self, out: Path, batch: int, shuffled: bool, workers: int) -> Settings:
        def settled(count: int) -> Callable[[], Epoch]:
            def made() -> Epoch:
                loader = self._loader(out, batch, shuffled, count)
                return lambda: loader

            return made

        return {f"{count} thread{'s' * (count > 1)}": settled(count) for count in sorted({1, workers})}

    def chw(self, images: Any) -> Any:
        return images.permute(0, 3, 1, 2)


WAYS: dict[str, type[Way]] = {
    "limit": InMemory,
    "mmcompile": Ours,
    "ImageFolder": ImageFolder,
    "tensordict": TensorDicts,
    "mmap_ninja": Ninja,
    "MosaicML Streaming": Streaming,
    "LitData": LitData,
    "HF datasets": HuggingFace,
    "WebDataset": WebDataset,
    "FFCV": FFCV,
}


class Served:
    """The commands of a child for one way: all are told where things are, and how many workers there may be."""

    def __init__(self, way: Way, batch: int, workers: int) -> None:
        self.way, self.batch, self.workers = way, batch, workers
        self.epochs: dict[bool, Epoch] = {}

    def ready(self) -> str:
        importlib.import_module(self.way.library)
        return self.way.mixing

    def build(self, raw: str, out: str) -> float:
        begun = time.perf_counter()
        self.way.build(Path(raw), Path(out), self.workers)
        return time.perf_counter() - begun

    def open(self, out: str) -> float:
        begun = time.perf_counter()
        self.way.first(Path(out))
        return time.perf_counter() - begun

    def choose(self, out: str, shuffled: bool, among: list[str] | None = None, tries: int = 1) -> dict[str, Any]:
        """Try all settings (or those named), each after an epoch that is not counted; keeps the fastest."""
        tried: dict[str, float] = {}
        for name, make in self.way.settings(Path(out), self.batch, shuffled, self.workers).items():
            if among is None or name in among:
                epoch = make()
                tried[name] = min(self._timed(epoch) for _ in range(1 + tries))
                if tried[name] == min(tried.values()):
                    self.epochs[shuffled] = epoch
        return {"setting": min(tried, key=lambda name: tried[name]), "tried": tried}

    def epoch(self, shuffled: bool) -> float:
        return self._timed(self.epochs[shuffled])

    def _timed(self, epoch: Epoch) -> float:
        begun = time.perf_counter()
        for images, _ in epoch():
            touched(images)
        return time.perf_counter() - begun

    def check(self, shuffled: bool) -> dict[str, Any]:
        rows = Rows((self.way.chw(images), labels) for images, labels in self.epochs[shuffled]())
        return {"rows": len(rows.found), "ordered": rows.digest(True), "set": rows.digest(False)}

    def once(self, out: str, shuffled: bool, setting: str) -> int:
        """An epoch with a setting in a process that did nothing else, for its memory."""
        epoch = self.way.settings(Path(out), self.batch, shuffled, self.workers)[setting]()
        return sum(touched(images) for images, _ in epoch())


if __name__ == "__main__":
    served = Served(WAYS[sys.argv[1]](), int(sys.argv[2]), int(sys.argv[3]))
    serve({name: getattr(served, name) for name in ("ready", "build", "open", "choose", "epoch", "check", "once")})
