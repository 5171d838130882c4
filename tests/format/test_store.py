from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from mmcompile.errors import RemoteError
from mmcompile.format.store import Store, is_url
from tests.s3 import Bucket, Proxy


@pytest.fixture(params=["s3", "memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return Store(request.getfixturevalue("s3_bucket").url + "/out")
    return Store(f"memory://{tmp_path.name}/out" if request.param == "memory" else f"file://{tmp_path}/out")


def test_what_is_written_is_read_listed_and_deleted(store: Store, tmp_path: Path) -> None:
    assert store.stat("a") is None
    assert list(store.list("")) == []
    store.write("shards/a.npy", b"0123456789")
    assert (store.read("shards/a.npy"), store.read("shards/a.npy", 2, 5), store.size("shards/a.npy")) == (b"0123456789", b"234", 10)
    (tmp_path / "b").write_bytes(b"b" * 100_000)
    store.put(tmp_path / "b", "shards/b.npy")
    assert store.get("shards/b.npy", tmp_path / "c") == 100_000
    assert (tmp_path / "c").read_bytes() == b"b" * 100_000
    assert [(name, facts["type"]) for name, facts in store.list("")] == [("shards", "directory")]
    assert [(name, facts["size"]) for name, facts in store.list("shards")] == [("shards/a.npy", 10), ("shards/b.npy", 100_000)]
    store.delete(["shards/b.npy", "shards/nothing"])
    assert store.size("shards/b.npy") is None
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.read("shards/nothing")


def test_create_makes_an_object_once(store: Store) -> None:
    assert store.create("lock", b"1")
    assert not store.create("lock", b"2")
    assert store.read("lock") == b"1"


def test_the_stamp_changes_with_the_content(store: Store) -> None:
    store.write("a", b"1")
    first = store.stat("a")
    store.write("a", b"2")
    second = store.stat("a")
    assert first is not None
    assert second is not None
    assert first.stamp != second.stamp


def test_a_store_pickles_as_its_url_and_works_after_a_fork(s3_bucket: Bucket) -> None:
    store = Store(s3_bucket.url)
    store.write("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert again.read("a") == b"1"


def test_failures_are_tried_again_then_name_the_object(s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    store = Store(s3_bucket.url)
    store.write("a", b"0123456789" * 1000)
    for fault in ("drop", "truncate", 500, 503):
        s3_proxy.forget()
        s3_proxy.fault = lambda asked, fault=fault: fault if asked.number < 2 else None  # type: ignore[misc]
        assert store.read("a") == b"0123456789" * 1000
        assert len(s3_proxy.asked) > 2
    s3_proxy.fault = lambda asked: 503
    with pytest.raises(RemoteError, match=r"s3://.*/a: failed 4 times") as caught:
        store.read("a")
    assert caught.value.details["path"] == store.where("a")


def test_an_upload_is_whole_or_not_there(s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path) -> None:
    store = Store(s3_bucket.url)
    (tmp_path / "f").write_bytes(os.urandom(3_000_000))
    s3_proxy.fault = lambda asked: "drop" if asked.method == "PUT" else None
    with pytest.raises(RemoteError, match="/f: failed"):
        store.put(tmp_path / "f", "f")
    assert s3_bucket.files() == {}
    s3_proxy.fault = lambda asked: "lost" if asked.number % 3 else None
    store.put(tmp_path / "f", "f")
    assert s3_bucket.files() == {"f": (tmp_path / "f").read_bytes()}


def test_what_no_further_try_mends_is_said_at_once(s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_proxy.fault = lambda asked: 403
    with pytest.raises(RemoteError, match="s3://no-such/a"):
        Store("s3://no-such").read("a")
    assert len(s3_proxy.asked) == 1
    s3_proxy.fault = lambda asked: None
    s3_proxy.forget()
    with pytest.raises(RemoteError, match="bucket"):
        Store("s3://no-such").write("a", b"")
    assert len(s3_proxy.asked) == 1
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3_proxy.forget()
    with pytest.raises(RemoteError, match="credentials"):
        Store("s3://no-such").read("a")
    assert not s3_proxy.asked


def test_an_unknown_kind_of_url_and_a_missing_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="foo"):
        Store("foo://x/y")
    import builtins

    real = builtins.__import__

    def without(name: str, *args: object, **more: object) -> object:
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RemoteError, match=r"mmcompile\[remote\]"):
        Store("s3://x/y")


def test_what_is_a_url() -> None:
    assert [is_url(place) for place in ("s3://b/x", "memory://x", "/tmp/x", "x", "c://x", Path("s3://b"), b"s3://b", "a b://x")] == [
        True,
        True,
        *[False] * 6,
    ]
