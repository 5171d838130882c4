from __future__ import annotations

import contextlib
import copy
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile.runtime import device as module
from mmcompile.runtime.augment import Augment
from mmcompile.runtime.dataset import MMapShardDataset
from mmcompile.runtime.device import Mover, Resident, free_bytes
from mmcompile.runtime.loader import ShardLoader
from tests.support import forked, make_dataset

CPU = torch.device("cpu")
ROW = 3 * 6 * 5 + 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 6, 5), dtype=np.uint8)
    make_dataset(tmp_path, images, np.arange(40) % 4, shards=(15, 5, 20), normalize=((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    return tmp_path


def resident(ds: MMapShardDataset, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> MMapShardDataset:
    """A dataset whose rows lie on a device as those of an accelerator do, in memory of the CPU."""

    class Elsewhere:
        type, index = "elsewhere", 0

    made = torch.empty

    def empty(*args: Any, **options: Any) -> Any:
        return made(*args, **{**options, "device": CPU} if isinstance(options.get("device"), Elsewhere) else options)

    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "empty", empty)
        patch.setattr(module, "free_bytes", lambda device: 1 << 30)
        held: Any = module.to_device(ds, Elsewhere(), budget)  # type: ignore[arg-type]
    assert isinstance(held, Resident)
    held.device = CPU
    out = copy.copy(ds)
    out._resident = held
    return out


def batches(loader: ShardLoader) -> list[Any]:
    return [list(batch) for batch in loader]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride() for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.mark.parametrize("budget", [None, 0, ROW * 15, ROW * 19, ROW * 20, ROW * 40, 1 << 20])
@pytest.mark.parametrize("augment", [None, Augment(crop=4, padding=1, hflip=0.5)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resident_dataset_gives_the_same_batches_in_the_same_order(
    root: Path, budget: int | None, augment: Augment | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = MMapShardDataset(root)
    there = resident(ds, budget, monkeypatch)
    assert there._resident is not None
    assert len(there._resident) == {None: 40, 0: 0, ROW * 15: 15, ROW * 19: 15, ROW * 20: 20, ROW * 40: 40, 1 << 20: 40}[budget]
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3, "augment": augment, "num_workers": workers}
    plain, held = ShardLoader(ds, **options), ShardLoader(there, **options)
    for _ in range(2):
        assert same(batches(held), batches(plain))


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_batches_and_samples_by_index_are_the_files(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 6, 5), dtype=np.uint8)
    make_dataset(tmp_path, images, np.arange(20) % 4, shards=(5, 15), layout=layout)
    ds = MMapShardDataset(tmp_path, crop=4)
    for budget in (None, (3 * 4 * 4 + 8) * 5, 0):
        there = resident(ds, budget, monkeypatch)
        for keys in ([3, 19, 3, 7], [], [0], list(range(20))):
            assert same([there[keys]], [ds[keys]])
        assert torch.equal(there[7][0], ds[7][0])
        assert there[7][1] == ds[7][1]
        assert type(there[7][1]) is int


def test_a_subset_holds_its_rows_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root).subset([30, 2, 2, 17, 39, 0])
    for budget, held in ((None, 5), (ROW * 3, 3), (ROW * 2, 2), (ROW, 0)):
        there = resident(ds, budget, monkeypatch)
        assert there._resident is not None
        assert len(there._resident) == held
        assert same([there[[5, 4, 3, 2, 1, 0]]], [ds[[5, 4, 3, 2, 1, 0]]])
        part = there.subset([1, 4])
        assert same([part[:]], [ds[[1, 4]]])


def test_hooks_get_what_is_resident(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = MMapShardDataset(root, transform=lambda x, generator: x + torch.rand(1, generator=generator))
    there = resident(ds, ROW * 15, monkeypatch)
    options: dict[str, Any] = {"batch_size": 9, "shuffle": True}
    assert same(batches(ShardLoader(there, **options)), batches(ShardLoader(ds, **options)))


def test_what_would_take_most_of_the_memory_is_refused_with_the_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = ROW * 40
    free = need * 10 // 6 - 1
    monkeypatch.setattr(module, "free_bytes", lambda device: free)
    ds = MMapShardDataset(root)
    with pytest.raises(MemoryError, match=rf"40 samples take {need:,} bytes, more than 60% of the {free:,} .*budget={int(free * 0.6)} "):
        ds.to_device("cpu")
    assert len(ds.to_device("cpu", budget=int(free * 0.6))) == 40
    monkeypatch.setattr(module, "free_bytes", lambda device: 7)
    with pytest.raises(MemoryError, match=rf"budget of {free + 1:,} bytes"):
        ds.to_device("cpu", budget=free + 1)
    for budget in (-1, True, 1.5, "8G"):
        with pytest.raises(ValueError, match="budget is a number of bytes"):
            ds.to_device("cpu", budget=budget)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "free_bytes", lambda device: need * 10 // 6 + 2)
    assert torch.equal(ds.to_device("cpu")[:][0], ds[:][0])


def test_free_memory_of_the_cpu_is_what_the_kernel_says() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < free_bytes(CPU) <= int(lines["MemTotal"].split()[0]) << 10
    with pytest.raises(ValueError, match="budget"):
        free_bytes(torch.device("meta"))


@pytest.mark.parametrize("engine", ["mmap", "pread"])
def test_on_the_cpu_it_is_the_page_cache_and_the_same_samples(root: Path, engine: str) -> None:
    ds = MMapShardDataset(root, engine=engine)
    there = ds.to_device("cpu")
    assert same([there[:]], [ds[:]])
    assert same(batches(ShardLoader(there, 7, shuffle=True)), batches(ShardLoader(ds, 7, shuffle=True)))
    assert len(pickle.loads(pickle.dumps(there))) == 40
    assert len(pickle.dumps(there)) < 1024
    assert there.to_device("cpu")[3][1] == ds[3][1]


def test_zero_samples_and_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (0, 1):
        make_dataset(tmp_path / str(n), np.zeros((n, 3, 4, 4), np.uint8), np.zeros(n, np.int64), classes=("a",))
        ds = MMapShardDataset(tmp_path / str(n))
        for there in (ds.to_device("cpu"), resident(ds, None, monkeypatch)):
            assert len(there[:][0]) == n
            assert sum(len(x) for x, _ in ShardLoader(there, 4)) == n
        assert ds.warm().wait()


def hold(root: Path, said: Connection) -> None:
    """Reads all of a dataset, and says what its images take of memory; holds it until nobody listens."""
    ds = MMapShardDataset(root).to_device("cpu")
    for i in range(0, len(ds), 50):
        ds[i : i + 50]
    said.send("ready")
    said.recv()
    found, ours = {"Rss": 0, "Pss": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            ours = "image-" in line
        elif ours and name[:-1] in found:
            found[name[:-1]] += int(rest[0]) << 10
    said.send(found)
    with contextlib.suppress(EOFError):
        said.recv()


def test_several_processes_share_one_copy(tmp_path: Path) -> None:
    """What each process adds to the memory of the machine is its share of the page cache (PSS), though each sees all of it (RSS)."""
    n, processes = 400, 4
    make_dataset(tmp_path, np.random.default_rng(0).integers(0, 256, (n, 3, 128, 128), dtype=np.uint8), shards=(200, 200))
    nbytes = n * 3 * 128 * 128
    run = [forked(hold, tmp_path) for _ in range(processes)]
    for _, said in run:
        assert said.recv() == "ready"
    found = []
    for _, said in run:
        said.send("go")
        found.append(said.recv())
    for process, said in run:
        said.close()
        process.join()
    assert all(one["Rss"] >= 0.99 * nbytes for one in found), found
    assert all(one["Pss"] <= 1.05 * nbytes / processes for one in found), found


def test_copies_run_on_a_stream_of_their_own_and_computing_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for CUDA: what is called, in which order, on which stream."""
    said: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "side"

        def wait_event(self, event: Any) -> None:
            said.append(f"{self.name} waits for {event.name}")

    class Event:
        made = 0

        def __init__(self, enable_timing: bool = False) -> None:
            Event.made += 1
            self.name = f"event {Event.made}"

        def record(self, stream: Stream) -> None:
            said.append(f"{self.name} on {stream.name}")

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 1500.0

    class On:
        def __init__(self, stream: Stream) -> None:
            pass

        def __enter__(self) -> None:
            said.append("begin side")

        def __exit__(self, *error: object) -> None:
            said.append("end side")

    current = Stream()
    current.name = "current"
    fake = SimpleNamespace(Stream=Stream, Event=Event, stream=On, current_stream=lambda device: current)
    monkeypatch.setattr(module.torch, "cuda", fake)

    class Part:
        def to(self, device: torch.device, non_blocking: bool) -> Part:
            said.append(f"copy to {device} {'beside' if non_blocking else 'and wait'}")
            return self

        def record_stream(self, stream: Stream) -> None:
            said.append(f"used on {stream.name}")

    mover = Mover(torch.device("cuda", 0))
    part: Any = Part()
    sent = mover.send([part], lambda parts: (said.append("finish"), parts)[1])
    assert mover.receive(sent) == [part]
    assert said == [
        *("begin side", "event 1 on side", "copy to cuda:0 beside", "finish", "event 2 on side", "end side"),
        *("current waits for event 2", "used on current"),
    ]
    assert mover.moved_s() == 1.5
    assert mover.memory is not None


def test_a_device_given_to_the_loader_is_where_batches_are(root: Path) -> None:
    ds = MMapShardDataset(root)
    for options in ({}, {"device": "cpu"}, {"device": CPU}):
        assert same(batches(ShardLoader(ds, 7, **options)), batches(ShardLoader(ds, 7)))  # type: ignore[arg-type]
    for images, labels in ShardLoader(ds, 7, device="meta"):
        assert images.device.type == labels.device.type == "meta"
        assert images.dtype == torch.float32
