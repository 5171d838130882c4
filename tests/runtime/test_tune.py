"""A tuning from beginning to end on small datasets: its form, what it leaves behind, and what it says when something is wrong."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

import mmcompile
from mmcompile import Augment, Cache, MMapShardDataset, ShardLoader, Tuning, tune
from mmcompile.runtime import tune as home
from mmcompile.runtime import tunedisk, tunetext, tunetrial
from mmcompile.runtime.tunechoice import Candidate, Choice, choose
from mmcompile.runtime.tuneparts import _spread, copy_of, ladder, memcpy, sample_of, stored_bytes
from mmcompile.runtime.tunetrial import Trials, Wish, end_workers
from mmcompile.text import json_ready
from tests.format.builders import tree
from tests.support import make_dataset

SCHEMA = json.loads((Path(mmcompile.__file__).parent.parent / "schemas" / "report.schema.json").read_text())
IMAGES = np.random.default_rng(0).integers(0, 256, (60, 3, 12, 10), dtype=np.uint8)
LABELS = np.arange(60) % 3
#: As short as it may be: figures say nothing then, form and order do.
SHORT = 1.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "out", IMAGES, LABELS, shards=(25, 25, 10))
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:  # that of a cache ends by itself, and so do those of queues that a DataLoader has closed
        assert thread.name.startswith(("mmcompile-fetch", "QueueFeederThread")), thread.name
        thread.join(60)
        assert not thread.is_alive()
    assert not multiprocessing.active_children()


def checked(tuning: Tuning) -> dict[str, Any]:
    """Its JSON, after what holds of every tuning."""
    document: dict[str, Any] = json.loads(json.dumps(json_ready(tuning.to_json()), allow_nan=False))
    jsonschema.validate(document, SCHEMA)
    assert tuning.choice in tuning.candidates
    assert tuning.choice.rates
    assert all(bool(c.rates) != bool(c.failed) or c.rates for c in tuning.candidates)
    told = str(tuning)
    assert told.count("\n* ") == 1
    assert tuning.reason in told
    assert all(line in told for line in tuning.lines)
    return document


def pasted(tuning: Tuning, **names: Any) -> dict[str, Any]:
    """What the lines of code leave behind."""
    space: dict[str, Any] = {"__name__": "__main__", **names}
    exec("\n".join(tuning.lines), space)
    return space


# ---------------------------------------------------------------- form, and what stays as it was


def test_a_tuning_has_its_form_and_leaves_all_as_it_was(root: Path) -> None:
    ds = MMapShardDataset(root)
    ds.set_epoch(5)
    before, state, files = dict(ds.__dict__), pickle.dumps(ds), tree(root)
    stages: list[str] = []
    tuning = tune(ds, batch_size=16, seconds=SHORT, progress=stages.append)
    document = checked(tuning)
    assert (document["command"], document["samples"], document["batch_size"], document["device"]) == ("tune", 60, 16, str(tuning.device))
    assert document["batch_bytes"] == 16 * (3 * 12 * 10 + 8)
    assert {c.loader for c in tuning.candidates} == {"ShardLoader", "DataLoader"}
    assert {c.num_workers for c in tuning.candidates} >= {0, 1}
    assert tuning.measured_over == "all samples, in memory"
    assert tuning.keeps_up is tuning.waited is tuning.step_time_s is None
    assert stages[0] == "measuring memory and disk"
    assert [s for s in stages if s.startswith("trying")]
    assert ds.epoch == 5
    assert ds.__dict__ == before
    assert pickle.dumps(ds) == state
    assert tree(root) == files


def test_the_lines_run_and_make_the_loader_that_was_chosen(root: Path) -> None:
    tuning = tune(MMapShardDataset(root, crop=8, dtype=torch.bfloat16, fields=("image", "label")), batch_size=16, seconds=SHORT)
    made = pasted(tuning)
    assert made["image"].shape == (12, 3, 8, 8)  # the last batch of 60
    assert made["image"].dtype == torch.bfloat16
    assert made["label"].shape == (12,)
    assert made["loader"].num_workers == tuning.choice.num_workers
    assert type(made["loader"]).__name__ == tuning.choice.loader


@pytest.mark.parametrize("loader", ["ShardLoader", "DataLoader"])
def test_the_chosen_loader_comes_ready_made_and_takes_further_arguments(root: Path, loader: str) -> None:
    ds = MMapShardDataset(root)
    wish = Wish(16)
    made = tunetrial.make_loader(ds, wish, Candidate(loader, 1, 3), {"seed": 7, "drop_last": True})
    same = ShardLoader(ds, 16, shuffle=True, seed=7, drop_last=True)
    assert isinstance(made, ShardLoader if loader == "ShardLoader" else DataLoader)
    assert (made.num_workers, made.prefetch_factor) == (1, 3)
    for (images, labels), (wanted, numbers) in zip(made, same, strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(labels, numbers)
    del made, images, labels
    tuning = tune(ds, batch_size=16, seconds=SHORT)
    own = tuning.loader(num_workers=0, prefetch_factor=None, batch_size=20) if tuning.choice.loader == "ShardLoader" else tuning.loader(batch_size=20)
    assert len(own) == 3
    assert own.dataset is ds


def test_lines_of_a_dataloader_run_where_processes_are_forked_or_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmcompile.runtime.tunetext import code

    ds = MMapShardDataset(root, output="dict")
    lines = code(ds, Wish(32), Candidate("DataLoader", 1, 2))
    assert "persistent_workers=True" in "\n".join(lines)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(lines), space)
    assert len(space["batch"]["image"]) == 28
    end_workers(space["loader"])
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    guarded = "\n".join(code(ds, Wish(32), Candidate("DataLoader", 1, 2)))
    assert 'if __name__ == "__main__":' in guarded
    exec(guarded, {"__name__": "imported by a worker"})
    assert "__main__" not in "\n".join(code(ds, Wish(32), Candidate("DataLoader", 0)))
    assert "__main__" not in "\n".join(code(ds, Wish(32), Candidate("ShardLoader", 2, 2)))


# ---------------------------------------------------------------- all kinds of datasets


def halve(image: torch.Tensor) -> torch.Tensor:
    return image.div_(2, rounding_mode="floor")


def in_workers_only(image: torch.Tensor) -> torch.Tensor:
    if get_worker_info() is not None:
        raise KeyError("not here")
    return image


def test_a_subset_with_a_transform_is_measured_as_it_is_and_given_to_the_lines(root: Path) -> None:
    ds = MMapShardDataset(root, transform=halve).subset(range(0, 60, 2))
    tuning = tune(Subset(ds, range(20)), batch_size=8, seconds=SHORT)
    checked(tuning)
    assert tuning.samples == 20
    assert tuning.candidates[0].loader == "DataLoader"  # the likely ones first
    assert tuning.parts.transform_s > 0
    assert "# dataset: the one that was tuned" in tuning.lines
    made = pasted(tuning, dataset=ds)
    assert made["image"].max() <= 127


def test_windows_values_and_dicts_are_tuned(tmp_path: Path) -> None:
    values = {"x": np.random.default_rng(0).standard_normal((500, 5)).astype(np.float32)}
    make_dataset(tmp_path, values=values, shards=(300, 200), keyed=False)
    tuning = tune(MMapShardDataset(tmp_path, output="dict").windows(8), batch_size=32, seconds=SHORT)
    checked(tuning)
    assert tuning.batch_bytes == 32 * 8 * 5 * 4
    assert pasted(tuning, dataset=MMapShardDataset(tmp_path, output="dict"))["batch"]["x"].shape[1:] == (5,)
    plain = tune(MMapShardDataset(tmp_path), batch_size=32, seconds=SHORT)
    assert pasted(plain)["x"].shape[1:] == (5,)


def test_augmentation_is_tuned_with_the_loader_that_can_do_it(root: Path) -> None:
    tuning = tune(
        MMapShardDataset(root), batch_size=16, seconds=SHORT, augment=Augment(crop=6, hflip=0.5), batch_transform=lambda batch, rng: batch[0]
    )
    checked(tuning)
    assert {c.loader for c in tuning.candidates} == {"ShardLoader"}
    made = pasted(tuning, batch_transform=lambda batch, rng: batch)
    assert made["image"].shape[1:] == (3, 6, 6)


def test_a_dataset_with_a_cache_is_tuned_over_what_is_here(root: Path, tmp_path: Path) -> None:
    ds = MMapShardDataset(root, cache=Cache(tmp_path / "cache", max_bytes=1 << 20))
    tuning = tune(ds, batch_size=16, seconds=SHORT)
    checked(tuning)
    assert tuning.disk.note == "not measured: the dataset comes through a cache"
    assert "which came through the cache at" in tuning.measured_over
    assert "# dataset: the one that was tuned" in tuning.lines


def test_one_sample_and_a_batch_that_is_larger_than_the_dataset(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES[:1], LABELS[:1])
    tuning = tune(MMapShardDataset(tmp_path), batch_size=512, seconds=SHORT)
    checked(tuning)
    assert (tuning.samples, tuning.batch_size, tuning.measured_over) == (1, 512, "all samples, in memory")
    assert tuning.disk.note == "not measured: so few samples say nothing of a disk"
    assert len(pasted(tuning)["image"]) == 1


def test_no_samples_are_one_line(tmp_path: Path) -> None:
    make_dataset(tmp_path, IMAGES[:0], LABELS[:0], classes=("a",))
    with pytest.raises(ValueError, match="has no samples, so there is nothing to measure"):
        tune(MMapShardDataset(tmp_path), seconds=SHORT)


# ---------------------------------------------------------------- beside a step


def test_with_a_long_step_the_loader_keeps_up_if_it_is_seen_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Candidate, float]] = []

    def waiting(trials: Trials, candidate: Candidate, step_s: float, for_s: float) -> float:
        seen.append((candidate, step_s))
        return share

    monkeypatch.setattr(Trials, "waiting", waiting)
    monkeypatch.setattr(home, "_STEPS", 1e5)  # there is time to see such steps
    share = 0.001
    tuning = tune(MMapShardDataset(root), batch_size=4, step_time_s=1000.0, seconds=SHORT)
    document = checked(tuning)
    assert tuning.keeps_up
    assert seen == [(tuning.choice, 1000.0)]
    assert document["waited"] == tuning.waited == 0.001
    assert (tuning.bottleneck, tuning.advice) == ("consumer", ())
    assert "training will not wait: a step takes 16 min 40 s" in str(tuning)
    share = 0.5
    seen.clear()
    tuning = tune(MMapShardDataset(root), batch_size=4, step_time_s=1000.0, seconds=SHORT)
    checked(tuning)
    assert tuning.keeps_up is False
    assert {candidate for candidate, _ in seen} == {c for c in tuning.candidates if c.rates}
    assert tuning.choice == seen[0][0]  # the smallest of those that are alike
    assert tuning.waited == 0.5
    assert "it was waited for least" in tuning.reason
    assert "training waited 50.0% of the time beside steps of that length" in str(tuning)


def test_numbers_of_numpy_are_numbers(root: Path) -> None:
    tuning = tune(MMapShardDataset(root), batch_size=np.int64(4), step_time_s=np.float32(0.5), seconds=np.int64(1))  # type: ignore[arg-type]
    assert checked(tuning)["step_time_s"] == 0.5


def test_waiting_is_a_share_of_the_time_beside_steps(root: Path) -> None:
    trials = Trials(MMapShardDataset(root), Wish(16), 1 << 16)
    for candidate in (Candidate("ShardLoader", 1, 2), Candidate("DataLoader", 1, 2)):
        assert 0 < trials.waiting(candidate, 0.001, 0.02) < 1


def test_with_a_step_that_no_loader_keeps_up_with_it_says_by_how_much(root: Path) -> None:
    tuning = tune(MMapShardDataset(root), batch_size=16, step_time_s=1e-7, seconds=SHORT)
    checked(tuning)
    assert tuning.keeps_up is False
    assert tuning.bottleneck != "consumer"
    assert "training will wait" in str(tuning)


# ---------------------------------------------------------------- faults


def test_what_is_no_dataset_of_ours_is_refused(root: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for other in (Stream(), [1, 2, 3], str(root)):
        with pytest.raises(TypeError, match="reads a MMapShardDataset"):
            tune(other, seconds=SHORT)  # type: ignore[arg-type]


def test_arguments_that_make_no_sense_are_refused(root: Path) -> None:
    ds = MMapShardDataset(root)
    for arguments, said in (
        ({"batch_size": 0}, "batch_size must be"),
        ({"seconds": 0.5}, "seconds must be at least 1, not 0.5"),
        ({"seconds": float("nan")}, "seconds must be"),
        ({"step_time_s": 0}, "step_time_s is in seconds, above 0, not 0"),
        ({"step_time_s": True}, "step_time_s is in seconds"),
        ({"device": "meta"}, "device meta holds no data"),
        ({"device": "nowhere"}, "device must be such as 'cpu', 'cuda'"),
        ({"augment": Augment(crop=500, hflip=0.5)}, "500"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            tune(ds, **arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(root: Path) -> None:
    with pytest.raises(RuntimeError, match="device cuda: this process sees 0 CUDA devices; pass another, or device='cpu'"):
        tune(MMapShardDataset(root), device="cuda")


def test_an_error_of_a_transform_comes_as_it_is(root: Path) -> None:
    def fail(image: torch.Tensor) -> torch.Tensor:
        raise LookupError("in a transform")

    with pytest.raises(LookupError, match="in a transform"):
        tune(MMapShardDataset(root, transform=fail), batch_size=16, seconds=SHORT)


def test_what_fails_in_worker_processes_alone_is_said_of_the_candidate(root: Path) -> None:
    trials = Trials(MMapShardDataset(root, transform=in_workers_only), Wish(16), 1 << 16)
    found = trials.run(Candidate("DataLoader", 1, 2), 0.01, 60.0)
    assert found.rates == ()
    assert found.failed == "KeyError: KeyError: 'not here'"
    assert trials.run(Candidate("DataLoader", 0), 0.01, 60.0).rates


def test_where_processes_are_spawned_what_cannot_travel_is_said_of_the_candidate(root: Path) -> None:
    found = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        trials = Trials(MMapShardDataset(root, transform=lambda image: image), Wish(16), 1 << 16)
        candidate = trials.run(Candidate("DataLoader", 1, 2), 0.01, 20.0)
    finally:
        multiprocessing.set_start_method(found, force=True)
    assert candidate.rates == ()
    assert "pickle" in (candidate.failed or "")


@pytest.mark.parametrize("at", ["reading a sample", "trying ShardLoader with 1", "trying DataLoader with no"])
def test_ctrl_c_leaves_nothing_behind(root: Path, at: str) -> None:
    def press(stage: str) -> None:
        if stage.startswith(at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(MMapShardDataset(root), batch_size=16, seconds=2.0, progress=press)


def test_ctrl_c_within_a_batch_ends_threads_and_processes(root: Path) -> None:
    calls = [0]

    def press(image: torch.Tensor) -> torch.Tensor:
        calls[0] += get_worker_info() is None
        if calls[0] > 150:
            raise KeyboardInterrupt
        return image

    with pytest.raises(KeyboardInterrupt):
        tune(MMapShardDataset(root, transform=press), batch_size=16, seconds=SHORT)


def test_a_slow_transform_is_measured_with_smaller_batches(root: Path) -> None:
    def slow(image: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return image

    tuning = tune(MMapShardDataset(root, transform=slow), batch_size=60, seconds=2.0)
    checked(tuning)
    assert tuning.measured_batch < 60
    assert f"with batches of {tuning.measured_batch:,}, as one of 60 takes too long" in str(tuning)
    assert tuning.parts.transform_s >= 0.02


def test_a_candidate_that_gives_no_batch_in_time_is_said_so(root: Path) -> None:
    def slow(image: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return image

    trials = Trials(MMapShardDataset(root, transform=slow), Wish(16), 1 << 16)
    for candidate in (Candidate("ShardLoader", 1, 2), Candidate("ShardLoader", 0), Candidate("DataLoader", 1, 2)):
        found = trials.run(candidate, 0.01, 0.1)
        assert found.rates == ()
        assert "no batch" in (found.failed or "")


def test_batches_that_have_no_room_are_not_tried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(MMapShardDataset(root), Wish(16), 1 << 30)
    monkeypatch.setattr(tunetrial, "free_bytes", lambda device: 8 << 30)
    found = trials.run(Candidate("ShardLoader", 2, 4), 0.01, 1.0)
    assert found.failed == "not tried: 9 batches take 9,663,676,416 bytes, of memory 8,589,934,592 are free"
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, 16384, 0, 0, 0, 0, 255)))
    docker = trials.run(Candidate("DataLoader", 1, 2), 0.01, 1.0)
    assert docker.failed == "not tried: 3 batches take 3,221,225,472 bytes, /dev/shm has 67,108,864 left (in Docker: --shm-size)"
    assert trials.run(Candidate("DataLoader", 0), 0.01, 5.0).rates


def test_no_loader_in_time_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(trials: Trials, candidate: Candidate, slice_s: float, limit_s: float) -> Candidate:
        return Candidate(candidate.loader, candidate.num_workers, failed="gave no batch of 16 within 0 s")

    monkeypatch.setattr(Trials, "run", none)
    with pytest.raises(TimeoutError, match=r"no loader gave a batch in 1 s \(ShardLoader with no workers: gave no batch .*give it more seconds"):
        tune(MMapShardDataset(root), batch_size=16, seconds=SHORT)


# ---------------------------------------------------------------- parts


def test_threads_of_the_ladder_double_up_to_the_most() -> None:
    assert [ladder(most) for most in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
    found = memcpy(0.02)
    assert next(iter(found)) == 1
    assert all(rate > 0 for rate in found.values())


def test_a_sample_of_a_large_dataset_comes_from_all_over_it(root: Path) -> None:
    ds = MMapShardDataset(root)
    sample = sample_of(copy_of(ds), 10, 20 * (3 * 12 * 10 + 8), 5.0)
    assert sample.note == "20 of 60 samples, in memory"
    labels = [int(label) for _, label in sample.dataset]
    assert len(labels) == 20
    rows = sample.dataset._where(np.arange(20))
    assert (np.diff(rows) > 0).all()
    assert rows[0] < 5
    assert rows[-1] > 50
    assert stored_bytes(ds) == 60 * (3 * 12 * 10 + 8)


@pytest.mark.parametrize(("n", "count"), [(1, 1), (60, 60), (60, 7), (1000, 999), (10**9, 2_000_000)])
def test_pieces_of_a_sample_are_apart_and_as_many_as_asked_for(n: int, count: int) -> None:
    pieces = _spread(n, count)
    assert sum(stop - first for first, stop in pieces) == count
    assert pieces[0][0] == 0
    assert pieces[-1][1] <= n
    assert all(first < stop for first, stop in pieces)
    assert all(stop <= first for (_, stop), (first, _) in pairwise(pieces))


def test_of_a_dataset_with_a_cache_whole_shards_are_measured(root: Path, tmp_path: Path) -> None:
    ds = MMapShardDataset(root, cache=Cache(tmp_path / "cache", max_bytes=1 << 20))
    sample = sample_of(copy_of(ds), 10, 26 * (3 * 12 * 10 + 8), 30.0)
    assert len(sample.dataset) == 50
    assert sample.note.startswith("50 of 60 samples, in memory, which came through the cache at")


def test_only_files_of_the_fields_in_use_are_dropped_from_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (400, 3, 40, 40), dtype=np.uint8)
    make_dataset(tmp_path, images, np.zeros(400), shards=(150, 150, 100))
    before, dropped = tree(tmp_path), []
    real = os.posix_fadvise

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((os.readlink(f"/proc/self/fd/{fd}"), offset, length))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    ds = MMapShardDataset(tmp_path, fields=("image",))
    found = tunedisk.cold_disk(copy_of(ds), 0.5, 32)
    assert found.note
    assert {Path(path).parent for path, _, _ in dropped} == {tmp_path / "shards"}
    assert {Path(path).name.partition("-")[0] for path, _, _ in dropped} == {"image"}
    assert sum(length for _, _, length in dropped) <= tunedisk.COLD_BYTES
    assert (found.sequence_bytes_per_s is None) == found.note.startswith("not measured")
    assert tree(tmp_path) == before


def test_no_more_than_said_is_dropped_for_scattered_rows_and_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"x": np.zeros((4000, 1024), np.uint8)}
    make_dataset(tmp_path, values=values, shards=(2000, 2000), keyed=False)
    monkeypatch.setattr(tunedisk, "_FOLIO", 4096)
    monkeypatch.setattr(tunedisk, "_ROWS_BYTES", 1 << 20)
    dropped: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: dropped.append(length))
    ds = MMapShardDataset(tmp_path)
    for some in (ds, ds.subset(np.random.default_rng(0).permutation(4000)[:300]), ds.windows(50, stride=3)):
        dropped.clear()
        tunedisk.cold_disk(copy_of(some), 0.1, 16)
        assert (1 << 20) * 0.9 < sum(dropped) < (1 << 20) * 1.5


def test_a_shard_that_is_gone_is_said_as_ever(root: Path) -> None:
    next((root / "shards").glob("image-*")).unlink()
    with pytest.raises(mmcompile.CorruptShardError, match="image-"):
        tune(MMapShardDataset(root), batch_size=16, seconds=SHORT)


def test_a_file_system_in_memory_has_no_disk_and_that_is_said(tmp_path: Path) -> None:
    memory = Path("/dev/shm") / f"mmcompile-test-{os.getpid()}"
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm is not there")
    images = np.zeros((64, 3, 8, 8), np.uint8)
    try:
        make_dataset(memory, images, np.zeros(64))
        found = tunedisk.cold_disk(copy_of(MMapShardDataset(memory)), 0.2, 16)
    finally:
        import shutil

        with contextlib.suppress(OSError):
            shutil.rmtree(memory)
    assert found == tunedisk.Disk(note="not measured: the file system keeps the files in memory, or a process has them mapped")


def test_random_numbers_of_training_are_as_if_nothing_had_been_tuned(root: Path) -> None:
    state = torch.get_rng_state()
    tuning = tune(MMapShardDataset(root), batch_size=16, seconds=SHORT)
    assert [c for c in tuning.candidates if c.loader == "DataLoader" and c.rates]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_counts_with_the_samples_that_there_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float | None]] = []

    def recorded(some: list[Candidate], batch_size: int, needed: float | None, refused: list[Candidate]) -> Choice:
        asked.append((batch_size, needed))
        return choose(some, batch_size, needed, refused)

    monkeypatch.setattr(home, "choose", recorded)
    tuning = tune(MMapShardDataset(root), batch_size=600, step_time_s=30.0, seconds=SHORT)
    assert asked == [(60, 2.0)]
    assert f"a batch {tunetext._short(60 / (tuning.choice.samples_per_s or 0.0))}" in str(tuning)
