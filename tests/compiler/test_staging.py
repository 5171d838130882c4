from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import away, shardcall, staging
from mmcompile.compiler.outcome import Progress
from mmcompile.errors import BuildError, DecodeError, OptionError, OutputExistsError, RemoteError, SourceError
from mmcompile.format import storelock
from mmcompile.format.describe import describe
from mmcompile.format.prune import prune
from mmcompile.format.store import Store
from mmcompile.format.verify import verify
from tests.compiler.builds import BROKEN, dataset, inline, make_raw, picture, run, write
from tests.compiler.test_paired import mask, pairs, source
from tests.s3 import Bucket, Proxy

pytestmark = pytest.mark.usefixtures("home")


def local(raw: Path, out: Path, **more: Any) -> dict[str, bytes]:
    run(raw, out, **more)
    return dataset(out)


def published(bucket: Bucket, folder: str = "out") -> dict[str, bytes]:
    """The objects of a dataset, and of nothing else, but what stays in .build/."""
    found = bucket.files(folder)
    assert {name for name in found if name.startswith(".build")} <= {".build/settings.json", ".build/stat-cache", ".build/exclude.json"}
    return {name: data for name, data in found.items() if not name.startswith(".build")}


def files_of(raw: Path) -> dict[str, bytes]:
    return {str(p.relative_to(raw)): p.read_bytes() for p in raw.rglob("*") if p.is_file()}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds without processes, so that the short waits hold wherever requests are made."""
    inline(monkeypatch)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return make_raw(tmp_path / "raw", 7)


def test_a_dataset_on_a_store_is_the_one_on_a_disk(raw: Path, s3_bucket: Bucket, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(raw, s3_bucket.url + "/out", workers=2)
    inline(monkeypatch)
    expected = local(raw, tmp_path / "out")
    assert published(s3_bucket) == expected
    assert (report.out, report.samples, report.decoded) == (s3_bucket.url + "/out", 14, 14)
    url = s3_bucket.fill(files_of(raw), "raw")
    run(url, s3_bucket.url + "/other")
    assert published(s3_bucket, "other") == expected
    assert local(url, tmp_path / "third") == expected  # type: ignore[arg-type]
    assert not any(path.is_file() for path in home.rglob("*"))


@pytest.mark.usefixtures("in_process")
def test_samples_of_several_files_have_their_sha256_and_hashed_keys_there_too(s3_bucket: Bucket, tmp_path: Path) -> None:
    raw = pairs(tmp_path / "pairs", ["a", "b", "c", "d"])
    (tmp_path / "secret.key").write_bytes(b"0123456789abcdef of a test")
    how = {"options": {"sha256": True, "keys": f"hash:{tmp_path / 'secret.key'}"}}
    expected = local(source(raw), tmp_path / "out", **how)  # type: ignore[arg-type]
    url = s3_bucket.fill(files_of(raw), "pairs")
    run(source(url, source="pairs"), s3_bucket.url + "/out", **how)
    assert published(s3_bucket) == expected
    write(raw, {"masks/b.png": mask(99)})
    expected = local(source(raw), tmp_path / "out", **how)  # type: ignore[arg-type]
    s3_bucket.fill({"masks/b.png": mask(99)}, "pairs")
    report = run(source(url, source="pairs"), s3_bucket.url + "/out", **how)
    changed = published(s3_bucket)
    assert {name: changed[name] for name in expected} == expected
    assert report.decoded == 1


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.usefixtures("in_process")
def test_other_stores_hold_the_same_dataset(kind: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = local(raw, tmp_path / "out")
    url = f"memory://{tmp_path.name}/out" if kind == "memory" else f"file://{tmp_path}/there"
    run(raw, url)
    store = Store(url)
    assert {name: store.read(name) for name in expected} == expected
    if kind == "file":
        assert dataset(tmp_path / "there") == expected
        assert (tmp_path / "there" / ".build" / "lock").exists(), "written as a folder"
        assert describe(url)["root"] == prune(url, delete=True).root == verify(url).root == str(tmp_path / "there")


@pytest.mark.usefixtures("in_process")
def test_nothing_is_written_again_when_nothing_changed(raw: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    url = s3_bucket.fill(files_of(raw), "raw")
    time.sleep(2.1)  # younger objects are read again: a store's clock tells whole seconds
    run(url, s3_bucket.url + "/out")
    before = published(s3_bucket)
    s3_proxy.forget()
    report = run(url, s3_bucket.url + "/out")
    assert (report.kept, report.decoded, report.copied) == (14, 0, 0)
    assert published(s3_bucket) == before
    assert s3_proxy.count("GET", "/raw/") == 0, "known by their ETag"
    assert s3_proxy.count("GET", "image-") == 0
    assert {a.path.split("?")[0].rpartition("/")[2] for a in s3_proxy.asked if a.method == "PUT"} == {"lock"}


@pytest.mark.usefixtures("in_process")
def test_a_rebuild_copies_rows_from_the_store_and_fetches_only_the_shards_that_it_needs(
    raw: Path, s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path
) -> None:
    run(raw, s3_bucket.url + "/out")
    write(raw, {"dog/new.png": picture(99)})
    s3_proxy.forget()
    report = run(raw, s3_bucket.url + "/out")
    expected = local(raw, tmp_path / "out")
    assert {name: data for name, data in published(s3_bucket).items() if name in expected} == expected
    assert report.decoded == 1
    assert report.copied + report.kept == 14
    fetched = {a.path.split("?")[0] for a in s3_proxy.asked if a.method == "GET" and "/image-" in a.path}
    assert 1 <= len(fetched) <= 3


@pytest.mark.usefixtures("in_process")
def test_a_damaged_shard_on_the_store_is_not_copied_from(raw: Path, s3_bucket: Bucket, tmp_path: Path) -> None:
    run(raw, s3_bucket.url + "/out", rows=100)
    name = next(name for name in s3_bucket.files("out") if "image-" in name)
    data = bytearray(s3_bucket.files("out")[name])
    data[-5] ^= 1
    s3_bucket.fill({name: bytes(data)}, "out")
    write(raw, {"dog/new.png": picture(99)})
    report = run(raw, s3_bucket.url + "/out", rows=100)
    assert report.decoded == 15
    expected = local(raw, tmp_path / "out", rows=100)
    assert {name: data for name, data in published(s3_bucket).items() if name in expected} == expected


@pytest.mark.usefixtures("in_process")
def test_a_dry_run_writes_nothing(raw: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    report = run(raw, s3_bucket.url + "/out", dry_run=True)
    assert (report.samples, report.free_bytes, report.out) == (14, None, s3_bucket.url + "/out")
    assert s3_bucket.files() == {}
    assert {a.method for a in s3_proxy.asked} <= {"GET", "HEAD"}


@pytest.mark.usefixtures("in_process")
def test_out_holds_something_else_or_lies_in_raw(raw: Path, s3_bucket: Bucket, tmp_path: Path) -> None:
    url = s3_bucket.fill(files_of(raw), "raw")
    for out in (url, url + "/out", url.replace("s3://", "s3a://") + "/out"):
        with pytest.raises(OutputExistsError, match="inside RAW"):
            run(url, out)
    with pytest.raises(OutputExistsError, match="inside RAW"):
        run(raw, f"file://{raw}/out")
    with pytest.raises(OutputExistsError, match="inside RAW"):
        run(f"file://{raw}", raw / "out")
    s3_bucket.fill({"notes.txt": b"mine"}, "other")
    with pytest.raises(OutputExistsError, match=f"{s3_bucket.url}/other: holds what mmcompile did not write .'notes.txt'"):
        run(raw, s3_bucket.url + "/other")
    s3_bucket.fill({"index.json": b"{}"}, "third")
    with pytest.raises(OutputExistsError, match=r"an index\.json that mmcompile did not write"):
        run(raw, s3_bucket.url + "/third")
    assert set(s3_bucket.files("other")) == {"notes.txt"}


@pytest.mark.usefixtures("in_process")
def test_rejects_and_unreadable_objects_end_as_on_a_disk(raw: Path, s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path) -> None:
    write(raw, {"cat/broken.png": BROKEN})
    out = s3_bucket.url + "/out"
    with pytest.raises(DecodeError, match=f"see {out}/.build/rejects.jsonl") as rejected:
        run(raw, out)
    assert rejected.value.details["report"] == f"{out}/.build/rejects.jsonl"
    found = s3_bucket.files("out")
    assert b"broken.png" in found[".build/rejects.jsonl"]
    assert "index.json" not in found
    report = run(raw, out, max_rejects=1)
    assert (report.decoded, report.kept, report.rejects) == (0, 14, 1)
    assert report.rejects_file is not None
    assert report.rejects_file.startswith(f"{out}/shards/rejects-")
    assert published(s3_bucket) == local(raw, tmp_path / "out", max_rejects=1)
    url = s3_bucket.fill(files_of(raw), "raw")
    s3_proxy.fault = lambda asked: 503 if "raw/dog/3.jpg" in asked.path else None
    with pytest.raises(SourceError, match="1 file could not be read") as unread:
        run(url, s3_bucket.url + "/second", max_rejects=1)
    assert unread.value.details["keys"] == ["dog/3.jpg"]
    s3_proxy.fault = lambda asked: None
    report = run(url, s3_bucket.url + "/second", max_rejects=1)
    assert report.decoded <= 5, "all else was sealed"
    assert published(s3_bucket, "second") == local(raw, tmp_path / "out", max_rejects=1)


@pytest.mark.usefixtures("in_process")
def test_a_network_with_faults_changes_no_byte(raw: Path, s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path) -> None:
    expected = local(raw, tmp_path / "out")
    url = s3_bucket.fill(files_of(raw), "raw")
    faults: list[Any] = ["drop", 503, "truncate", 500, 0.01, "lost"]
    seen: set[str] = set()

    def fault(asked: Any) -> Any:
        """Every request fails the first time that it is made, in one way or another."""
        what = f"{asked.method} {asked.path.split('?')[0]}"
        if what in seen:
            return None
        seen.add(what)
        return faults[len(seen) % len(faults)]

    s3_proxy.fault = fault
    run(url, s3_bucket.url + "/out")
    assert published(s3_bucket) == expected


@pytest.mark.usefixtures("in_process")
def test_a_network_that_fails_for_good_names_the_object_and_keeps_what_is_finished(
    raw: Path, s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = s3_bucket.url + "/out"
    sent: set[str] = set()

    def fault(asked: Any) -> Any:
        if asked.method == "PUT" and "image-" in asked.path:
            sent.add(asked.path)
        return 503 if len(sent) > 2 and asked.method == "PUT" else None

    s3_proxy.fault = fault
    with pytest.raises(RemoteError, match=f"{out}/.*: failed 4 times"):
        run(raw, out)
    assert "index.json" not in s3_bucket.files("out")
    assert sum("image-" in name for name in s3_bucket.files("out")) == 2
    s3_proxy.fault = lambda asked: None
    s3_bucket.delete("out/.build/lock")
    report = run(raw, out)
    assert report.kept >= 4
    assert published(s3_bucket) == local(raw, tmp_path / "out")


@pytest.mark.parametrize("at", ["image-", "seals/", "index.json"])
def test_a_build_that_is_killed_goes_on_and_ends_with_the_same_objects(
    at: str, raw: Path, s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = s3_bucket.url + "/out"
    reached = threading.Event()
    count = 0

    def fault(asked: Any) -> Any:
        nonlocal count
        if asked.method == "PUT" and at in asked.path:
            count += 1
            if at not in ("image-", "seals/") or count == 4:
                reached.set()
                return 30.0
        return None

    s3_proxy.fault = fault
    child = subprocess.Popen([sys.executable, "-m", "tests.compiler.killed", str(raw), out])
    try:
        assert reached.wait(60)
    finally:
        child.kill()
        child.wait()
    assert "index.json" not in s3_bucket.files("out")
    s3_proxy.fault = lambda asked: None
    monkeypatch.setattr(storelock, "DEAD_S", 0.1)
    monkeypatch.setattr(storelock, "LOOK_S", 0.05)
    inline(monkeypatch)
    said: list[Progress] = []
    report = run(raw, out, rows=1, progress=said.append)
    assert any("waiting up to" in progress.message for progress in said)
    assert report.kept >= (1 if at in ("image-", "seals/") else 14)
    assert published(s3_bucket) == local(raw, tmp_path / "out", rows=1)
    assert not any(path.is_file() for path in home.rglob("*")), "what the killed one left is gone"


@pytest.mark.usefixtures("in_process")
def test_two_builds_at_once_are_told_apart(raw: Path, s3_bucket: Bucket, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = s3_bucket.url + "/out"
    monkeypatch.setattr(storelock, "RENEW_S", 0.05)
    monkeypatch.setattr(storelock, "DEAD_S", 5.0)
    monkeypatch.setattr(storelock, "LOOK_S", 0.2)
    at_work, go_on = threading.Event(), threading.Event()
    results: list[Any] = []

    def fault(asked: Any) -> Any:
        if asked.method == "PUT" and "image-" in asked.path and not at_work.is_set():
            at_work.set()
            go_on.wait(60)
        return None

    s3_proxy.fault = fault
    first = threading.Thread(target=lambda: results.append(run(raw, out)))
    first.start()
    assert at_work.wait(60)
    with pytest.raises(BuildError, match=f"{out}: another run is at work here .process {os.getpid()} on "):
        run(raw, out)
    go_on.set()
    first.join()
    assert results[0].samples == 14
    assert published(s3_bucket) == local(raw, tmp_path / "out")


@pytest.mark.usefixtures("in_process")
def test_a_build_whose_lock_was_taken_publishes_nothing(raw: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    def fault(asked: Any) -> Any:
        if asked.method == "PUT" and "image-" in asked.path:
            s3_bucket.fill({".build/lock": b'{"token": "another"}'}, "out")
        return None

    s3_proxy.fault = fault
    with pytest.raises(BuildError, match="nothing is published"):
        run(raw, s3_bucket.url + "/out")
    found = s3_bucket.files("out")
    assert "index.json" not in found
    assert b"another" in found[".build/lock"], "it is not ours to delete"


def test_a_lock_without_a_holder_is_taken_and_renewed(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = Store(s3_bucket.url), []
    monkeypatch.setattr(storelock, "DEAD_S", 0.1)
    monkeypatch.setattr(storelock, "LOOK_S", 0.05)
    monkeypatch.setattr(storelock, "RENEW_S", 0.02)
    store.write("lock", b'{"pid": 7, "host": "gone"}')
    with storelock.StoreLock(store, said.append, name="lock") as lock:
        assert said == [f"{s3_bucket.url}: locked by process 7 on gone; waiting up to 0 s to see whether it is still at work"]
        first = store.read("lock")
        while store.read("lock") == first:
            time.sleep(0.01)
        assert lock.still_held()
    assert store.size("lock") is None
    monkeypatch.setattr(storelock, "RENEW_S", 60.0)
    with storelock.StoreLock(store, said.append, name="lock") as lock:
        store.write("lock", b"other")
        assert not lock.still_held()
    assert store.read("lock") == b"other"


class Far(Executor):
    """Two threads that stand for workers on machines where nothing of the coordinator's is: it is only named."""

    workers = 2

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call, (job, *rest), more = pickle.loads(args[0])
        nowhere = Path("/nowhere")
        reuse = None if job.reuse is None else nowhere / job.reuse.name
        remembered = None if job.remembered is None else nowhere / job.remembered.name
        job = replace(job, scratch=nowhere / job.scratch.name, shards=nowhere / "out" / "shards", reuse=reuse, remembered=remembered)
        return self._threads.submit(fn, pickle.dumps((call, (job, *rest), more)))


@pytest.mark.usefixtures("in_process")
def test_workers_on_other_machines_need_nothing_but_the_store(raw: Path, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(raw, {"cat/broken.png": BROKEN})
    url, out = s3_bucket.fill(files_of(raw), "raw"), s3_bucket.url + "/out"
    engine = {"engine": Far()}
    try:
        report = run(url, out, options=engine, max_rejects=1)
        assert (report.decoded, report.rejects) == (14, 1)
        assert published(s3_bucket) == local(raw, tmp_path / "out", max_rejects=1)
        write(raw, {"dog/new.png": picture(99)})
        s3_bucket.fill({"dog/new.png": picture(99)}, "raw")
        report = run(url, out, options=engine, max_rejects=1)
        assert report.decoded == 1, "rows were copied from shards on the store, rejects remembered"
        expected = local(raw, tmp_path / "out", max_rejects=1)
        assert {name: data for name, data in published(s3_bucket).items() if name in expected} == expected
    finally:
        for executor in list(shardcall._idle):
            shardcall._end(executor)
        assert away._here is not None
        away._here[1].remove()
        monkeypatch.setattr(away, "_here", None)


def test_old_shards_are_fetched_once_and_the_least_used_go(s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path) -> None:
    from mmcompile.format.npy import save_array

    store = Store(s3_bucket.url)
    paths = []
    for i in range(4):
        digest = save_array(tmp_path, "image", np.full((10, 100), i, np.uint8), tmp_path)
        paths.append(tmp_path / f"image-{digest}.npy")
        store.put(paths[-1], f"shards/{paths[-1].name}")
    size = paths[0].stat().st_size
    bring = staging.Fetched(store, tmp_path / "fetched", 2 * size)
    s3_proxy.forget()
    for path in (*paths[:2], *paths[:2]):
        assert bring(path).read_bytes() == path.read_bytes()
    assert s3_proxy.count("GET") == 2
    os.utime(bring(paths[1]), (1, 1))
    bring(paths[2])
    assert {p.name for p in (tmp_path / "fetched").glob("*.npy")} == {paths[0].name, paths[2].name}
    with pytest.raises(FileNotFoundError):
        bring(tmp_path / "image-none.npy")


@pytest.mark.usefixtures("in_process")
def test_a_full_disk_here_is_said_at_once(raw: Path, s3_bucket: Bucket, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(BuildError, match=f"{s3_bucket.url}/out: no space left in {home}, where shards are made .TMPDIR."):
        run(raw, s3_bucket.url + "/out")


@pytest.mark.usefixtures("in_process")
def test_stubs_that_something_tidied_up_are_not_deleted_from_the_store(raw: Path, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    out = s3_bucket.url + "/out"
    run(raw, out)
    before = published(s3_bucket)
    write(raw, {"dog/new.png": picture(99)})
    real = staging.Staging.publish
    tidied: list[str] = []

    def publish(self: staging.Staging, *args: Any) -> None:
        for path in (self.folder / "shards").iterdir():
            if f"shards/{path.name}" in before and path.name.startswith("image-"):
                tidied.append(path.name)
                path.unlink()
        real(self, *args)

    monkeypatch.setattr(staging.Staging, "publish", publish)
    run(raw, out)
    assert tidied
    found = published(s3_bucket)
    assert {name: found.get(name) for name in before if name != "index.json"} == {name: before[name] for name in before if name != "index.json"}
    assert verify(out).ok


@pytest.mark.usefixtures("in_process")
def test_nothing_is_deleted_when_the_folder_lost_a_generation(raw: Path, s3_bucket: Bucket) -> None:
    out = s3_bucket.url + "/out"
    run(raw, out)
    before = published(s3_bucket)
    images = {name.removeprefix("shards/") for name in before if "image-" in name}
    with staging.Staging(out, lambda _: None) as work:
        work.pull()
        for path in (work.folder / "generations").iterdir():
            path.unlink()
        work.publish(lambda: True, images)
        assert published(s3_bucket) == before
        work.publish(lambda: True, None)
        assert published(s3_bucket) == before
        work.pull()
        work.publish(lambda: True, images)
        assert set(published(s3_bucket)) == set(before) - {f"shards/{name}" for name in images}


def test_a_dataset_in_memory_is_refused_to_other_processes(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^memory://{tmp_path.name}/out: lies in the memory of one process"):
        run(raw, f"memory://{tmp_path.name}/out")
