"""What goes wrong in a loop arrives in it, and nothing stays behind, whichever way the loop was left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mmcompile import Augment, CorruptShardError, MMapShardDataset, ShardLoader
from mmcompile.runtime.buffers import Pool
from mmcompile.runtime.pixels import ImageColumn
from tests.support import make_dataset

N = 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """40 images of 3 x 32 x 32 in shards of 10, with their numbers as labels."""
    make_dataset(tmp_path / "out", np.random.default_rng(0).integers(0, 256, (N, 3, 32, 32), np.uint8), np.arange(N), shards=(10,) * 4)
    return tmp_path / "out"


def threads() -> int:
    return sum(thread.name.startswith("mmcompile") for thread in threading.enumerate())


# -- errors


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("engine", ["mmap", "pread"])
@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_a_damaged_shard_arrives_in_its_turn(root: Path, workers: int, engine: str, how: str) -> None:
    ds = MMapShardDataset(root, engine=engine)
    loader = ShardLoader(ds, 5, num_workers=workers)
    path = ds._reader.path("image", 2)
    if how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    loop = iter(loader)
    assert [labels.tolist() for _, labels in (next(loop) for _ in range(4))] == np.arange(20).reshape(4, 5).tolist()
    with pytest.raises(CorruptShardError, match=path.name) as caught:
        next(loop)
    assert threads() == 0
    assert "make" in {entry.name for entry in caught.traceback}
    assert loader.state_dict()["position"] == 20


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_cut_while_it_is_open_is_an_exception_of_pread(root: Path, workers: int) -> None:
    ds = MMapShardDataset(root, engine="pread")
    ds[:]
    os.truncate(ds._reader.path("image", 1), 5000)
    with pytest.raises(CorruptShardError):
        list(ShardLoader(ds, 5, num_workers=workers))
    assert threads() == 0


class Own(Exception):
    pass


def fails(*_: Any) -> Any:
    raise Own("as it is")


class FailsLate:
    def __iter__(self) -> Iterator[int]:
        yield from range(10)
        raise Own("as it is")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("hooks", "settings", "before"),
    [
        ({"transform": fails}, {}, 0),
        ({"target_transform": lambda label: fails() if label == 12 else label}, {}, 2),
        ({}, {"batch_transform": fails}, 0),
        ({}, {"batch_transform": lambda batch, rng: fails() if 12 in batch[1] else batch}, 2),
        ({}, {"sampler": FailsLate()}, 2),
    ],
)
def test_what_functions_of_the_users_raise_arrives_as_it_is(root: Path, workers: int, hooks: Any, settings: Any, before: int) -> None:
    loader = ShardLoader(MMapShardDataset(root, **hooks), 5, num_workers=workers, **settings)
    loop = iter(loader)
    for _ in range(before):
        next(loop)
    with pytest.raises(Own, match=r"^as it is$") as caught:
        next(loop)
    assert loader.state_dict()["position"] == 5 * before
    assert threads() == 0, "while the error is kept"
    del caught


def test_an_index_that_is_none_is_refused(root: Path) -> None:
    ds = MMapShardDataset(root)
    for sampler, error in (([1, N], IndexError), ([0.5], TypeError), ([True, False], TypeError)):
        with pytest.raises(error):
            list(ShardLoader(ds, 2, sampler=sampler))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_timeout_names_what_it_waited_for(root: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    go, batch = threading.Event(), ImageColumn.batch

    def waits(self: ImageColumn, rows: Any, *args: Any, **kwargs: Any) -> Any:
        assert rows[0] != 10 or go.wait(60)
        return batch(self, rows, *args, **kwargs)

    monkeypatch.setattr(ImageColumn, "batch", waits)
    loop = iter(ShardLoader(MMapShardDataset(root), 5, num_workers=workers, timeout=0.2))
    assert [next(loop)[1][0].item() for _ in range(2)] == [0, 5]
    with pytest.raises(TimeoutError, match=r"no batch within 0\.2 s; a thread is gathering 5 rows of 'image' for batch 2 of this iteration"):
        next(loop)
    go.set()
    assert [labels[0].item() for _, labels in loop] == [10, 15, 20, 25, 30, 35]


# -- memory


@pytest.mark.parametrize(("workers", "factor"), [(0, 1), (1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("held", [1, 3])
@pytest.mark.parametrize("size", [4, 7])
def test_memory_is_that_of_batches_ahead_and_held_and_one(
    root: Path, workers: int, factor: int, held: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: dict[int, weakref.ref[Any]] = {}
    most, find = [0], Pool._find

    def watched(self: Pool, nbytes: int) -> Any:
        owner = find(self, nbytes)
        if nbytes > 8 * N:  # images
            owners[id(owner)] = weakref.ref(owner)
            most.append(sum(ref() is not None for ref in list(owners.values())))
        return owner

    monkeypatch.setattr(Pool, "_find", watched)
    loader = ShardLoader(MMapShardDataset(root), size, shuffle=True, num_workers=workers, prefetch_factor=factor)
    kept: deque[Any] = deque(maxlen=held)
    for _ in range(6):
        for batch in loader:
            kept.append(batch)
        del batch
        kept.clear()
    short = N % size > 0  # the last batch's may be memory of its own
    assert max(most) <= workers * factor + held + 1 + short


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.float32}, {"engine": "pread"}])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_page_is_faulted_in_the_steady_state(tmp_path: Path, settings: dict[str, Any], workers: int) -> None:
    make_dataset(tmp_path, np.random.default_rng(0).integers(0, 256, (330, 3, 64, 64), np.uint8), np.arange(330) % 9)
    loader = ShardLoader(MMapShardDataset(tmp_path, **settings), 50, shuffle=True, num_workers=workers, augment=Augment(hflip=0.5))
    faults = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for images, _labels in loader:
            del images
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # The smallest batch, of 30, has 90 pages of 4 KiB, and one that took fresh ones would do so in each epoch; threads that start take a few too.
    # Threads may come to be at their furthest ahead for the first time in any one epoch, and a machine short of memory takes pages away.
    assert min(faults) < 90, faults


@pytest.mark.parametrize("workers", [0, 2])
def test_what_you_keep_of_a_batch_never_changes(root: Path, workers: int) -> None:
    ds = MMapShardDataset(root, dtype=torch.float32)
    loader = ShardLoader(ds, 4, shuffle=True, num_workers=workers)
    weight = torch.ones((), requires_grad=True)
    kept: list[tuple[int, Any]] = []
    graphs = []
    for _ in range(3):
        for step, (images, labels) in enumerate(loader):
            views = [images[2], images.numpy()[2], images.detach()[2], torch.from_dlpack(images)[2], images.unbind(0)[2], images.view(4, -1)[2]]
            kept.append((int(labels[2]), views[step % len(views)]))
            graphs.append(((images * weight).square().sum(), labels))
            del images, views
    for label, view in kept:
        assert torch.equal(torch.as_tensor(view).reshape(3, 32, 32), ds[label][0])
    for loss, labels in graphs:
        (grad,) = torch.autograd.grad(loss, weight)
        assert torch.isclose(grad, 2 * sum((ds[int(i)][0] ** 2).sum() for i in labels))


# -- loops that are left


def leftovers() -> tuple[int, int]:
    return threads(), len(os.listdir("/proc/self/fd"))


def test_thousands_of_breaks_leave_nothing(root: Path) -> None:
    loader = ShardLoader(MMapShardDataset(root).subset(range(8)), 4, shuffle=True, num_workers=1)

    def breaks(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            for _batch in loader:
                break
        gc.collect()
        return len(gc.get_objects()), int(Path("/proc/self/statm").read_text().split()[1]) << 12, leftovers()[1]

    before, after = breaks(500), breaks(3_000)
    assert threads() == 0
    assert after[2] <= before[2]  # what an earlier test left may be collected meanwhile
    assert after[0] - before[0] < 1000
    assert after[1] - before[1] < 2 << 20  # 700 bytes a loop would be as much


@pytest.mark.parametrize("workers", [1, 3])
def test_no_way_to_leave_a_loop_leaves_threads(root: Path, workers: int) -> None:
    loader = ShardLoader(MMapShardDataset(root), 2, num_workers=workers)
    list(loader)
    before = leftovers()
    loop = iter(loader)
    next(loop)
    assert threads() == workers
    del loop
    assert leftovers() == before

    def batches(loader: ShardLoader) -> Iterator[Any]:
        yield from loader

    some = batches(loader)
    next(some)
    del some
    assert leftovers() == before
    with pytest.raises(Own):
        list(map(fails, loader))
    assert leftovers() == before
    loop = iter(loader)
    next(loop)
    loop.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="closed"):
        next(loop)
    assert leftovers() == before
    held: list[Any] = [iter(loader)]
    next(held[0])
    held.append(held)
    del held
    gc.collect()
    assert leftovers() == before
    loop = iter(loader)
    next(loop)
    del loader  # the loop goes on
    assert len(list(loop)) == N // 2 - 1
    assert leftovers() == before


def script(root: Path, code: str, *, workers: int = 2, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    """Run code with a loader; `interrupt`: Ctrl-C once it has said "go"."""
    head = f"""
import os, sys, threading, warnings
from mmcompile import MMapShardDataset, ShardLoader
warnings.simplefilter("error")
ds = MMapShardDataset({str(root)!r})
loader = ShardLoader(ds, 2, shuffle=True, num_workers={workers})
"""
    command = [sys.executable, "-X", "faulthandler", "-c", head + code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        if interrupt:
            said = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said + out, err)


INTERRUPTED = {
    "in the loop": "while True:\n    for k, _ in enumerate(loader):\n        if k == 3: print('go', flush=True)\n",
    "while it waits": """
from mmcompile.runtime.pixels import ImageColumn
real = ImageColumn.batch
def slow(self, rows, *args, **kwargs):
    print('go', flush=True)
    threading.Event().wait(0.5)
    return real(self, rows, *args, **kwargs)
ImageColumn.batch = slow
for _ in loader: pass
""",
    "in a transform": """
def slow(image):
    print('go', flush=True)
    threading.Event().wait()
for _ in ShardLoader(MMapShardDataset(ds.root, transform=slow), 2, num_workers=loader.num_workers): pass
""",
}


@pytest.mark.parametrize(("where", "workers"), [("in the loop", 0), ("in the loop", 2), ("while it waits", 2), ("in a transform", 2)])
def test_ctrl_c_ends_the_loop(root: Path, workers: int, where: str) -> None:
    done = script(root, INTERRUPTED[where], workers=workers, interrupt=True)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "Fatal" not in done.stderr


#: Interpreters that end one after another, each a fork of one that has loaded all and has no thread yet.
EXITS = """
warnings.filterwarnings("ignore", ".*multi-threaded")
statuses = []
for how, workers in (("loop = iter(loader); next(loop)", 0), ("for _ in loader: sys.exit(0)", 3), ("a = zip(loader, loader); next(a)", 1)):
    pid = os.fork()
    if not pid:
        loader = ShardLoader(ds, 2, shuffle=True, num_workers=workers)
        exec(how)
        sys.exit(0)
    statuses.append(os.waitpid(pid, 0)[1])
print(statuses)
"""


def test_the_interpreter_exits_in_mid_iteration(root: Path) -> None:
    done = script(root, EXITS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0, 0]\n", "")


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked child, which must neither fail nor hang."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(60)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_a_forked_child(root: Path, workers: int) -> None:
    loader = ShardLoader(MMapShardDataset(root), 2, shuffle=True, num_workers=workers)

    def loops() -> None:
        assert len(list(loader)) == N // 2
        for _ in loader:
            break
        assert threads() == 0

    for _ in loader:
        in_child(loops)
    process = multiprocessing.get_context("fork").Process(target=loops)
    process.start()
    process.join()
    assert process.exitcode == 0
    loop = iter(loader)
    next(loop)

    def goes_on() -> None:
        with pytest.raises(RuntimeError, match="begin a new one here"):
            next(loop)

    in_child(goes_on)
    assert len(list(loop)) == N // 2 - 1


class Sums(Dataset[int]):
    """Each sample is what a whole loop over a loader sums up to."""

    def __init__(self, loader: ShardLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: int) -> int:
        return sum(int(labels.sum()) for _, labels in self.loader)


def test_a_loader_in_a_worker_of_the_stock_loader(root: Path) -> None:
    loader = ShardLoader(MMapShardDataset(root), 7, shuffle=True, num_workers=2)
    batches = list(DataLoader(Sums(loader), 2, num_workers=2))
    assert torch.cat(batches).tolist() == [sum(range(N))] * 4


def test_a_batch_sampler_that_fills_one_list_again_and_again(root: Path) -> None:
    class Reuses:
        def __init__(self, make: Any) -> None:
            self.make = make

        def __iter__(self) -> Any:
            buffer = self.make([0] * 4)
            for at in range(0, 12, 4):
                buffer[:] = self.make(range(at, at + 4))
                yield buffer

        def __len__(self) -> int:
            return 3

    for make in (list, np.array, lambda values: torch.tensor(list(values))):
        for workers in (0, 2):
            loader = ShardLoader(MMapShardDataset(root, fields=("label",)), batch_sampler=Reuses(make), num_workers=workers)
            assert torch.equal(torch.cat(list(loader)), MMapShardDataset(root, fields=("label",))[:12])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_iteration_in_a_transform_does_not_end_the_epoch_in_silence(root: Path, workers: int) -> None:
    def stops(*values: Any) -> Any:
        raise StopIteration

    for loader in (
        ShardLoader(MMapShardDataset(root), 4, batch_transform=stops, num_workers=workers),
        ShardLoader(MMapShardDataset(root, transform=stops), 4, num_workers=workers),
    ):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(loader)


def test_two_threads_at_once_on_one_iteration_are_told(root: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def waits(batch: Any, rng: Any) -> Any:
        inside.set()
        assert go.wait(30)
        return batch

    iteration = iter(ShardLoader(MMapShardDataset(root), 4, batch_transform=waits))
    thread = threading.Thread(target=next, args=(iteration,))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match="two threads"):
        next(iteration)
    go.set()
    thread.join()
    next(iteration)


def test_what_was_read_in_inference_mode_can_be_trained_on(tmp_path: Path) -> None:
    make_dataset(tmp_path, np.ones((4, 3, 2, 2), np.float32), normalize=None)
    ds = MMapShardDataset(tmp_path)
    with torch.inference_mode():
        ds[0]
    weight = torch.ones(3, 2, 2, requires_grad=True)
    (weight * ds[1]).sum().backward()
    ds[1].add_(1)
    assert weight.grad is not None


def test_arguments_that_are_none(root: Path) -> None:
    ds = MMapShardDataset(root)
    for settings, said in (
        ({"device": "gpu"}, "device must be such as"),
        ({"timeout": "5"}, "timeout is in seconds"),
        ({"timeout": float("inf")}, "timeout is in seconds"),
        ({"batch_size": 1 << 62}, "batch_size must be"),
        ({"weights": [1j] * len(ds)}, "weights must be a number for each sample"),
        ({"weights": torch.utils.data.WeightedRandomSampler([1.0], 1)}, "a sampler is given as sampler="),
    ):
        with pytest.raises(ValueError, match=said):
            ShardLoader(ds, **settings)
    for name, said in (("dtype", "argument of MMapShardDataset"), ("shufle", "did you mean shuffle="), ("num_replicas", "world_size=")):
        with pytest.raises(TypeError, match=said):
            ShardLoader(ds, **{name: 2})
    with pytest.raises(TypeError, match="a list of lengths"):
        ds.random_split(0.9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="root is the path"):
        MMapShardDataset(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="crop needs an image"):
        MMapShardDataset(root, fields=("label",), crop=2)
    with pytest.raises(TypeError, match="progress is a function"):
        ds.warm(3)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        for use in (lambda: ShardLoader(ds, device="cuda"), lambda: ds.to_device("cuda:1")):
            with pytest.raises(RuntimeError, match="sees 0 CUDA devices"):
                use()


def test_a_timeout_of_a_transform_is_no_wait_that_can_go_on(root: Path) -> None:
    def late(batch: Any, rng: Any) -> Any:
        raise TimeoutError("mine")

    iteration = iter(ShardLoader(MMapShardDataset(root), 4, batch_transform=late))
    with pytest.raises(TimeoutError, match="mine"):
        next(iteration)
    with pytest.raises((StopIteration, RuntimeError)):
        next(iteration)
