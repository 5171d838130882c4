from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmcompile.errors import OptionError, RemoteError
from mmcompile.format import store as store_module
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


def test_a_path_that_listings_do_not_show_is_refused() -> None:
    for url in ("s3://b//raw", "s3://b/raw//out/", "memory://x/../y", "s3://b/./raw", "file:///a//b"):
        with pytest.raises(OptionError, match=r"its path has (an empty part|the part '\.\.?')"):
            Store(url)
    assert [Store(url).url for url in ("s3://b/raw/", "memory:///x", "file:///a/b")] == ["s3://b/raw", "memory:///x", "file:///a/b"]


def test_reading_past_the_end_gives_no_bytes(store: Store, tmp_path: Path) -> None:
    store.write("empty", b"")
    store.write("a", b"123")
    assert [store.read("empty", 0, 32), store.read("a", 3, 9), store.read("a", 2, 9), store.read("empty")] == [b"", b"", b"3", b""]
    assert store.get("empty", tmp_path / "here") == 0


def test_another_region_and_a_missing_bucket_are_said_at_once(s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    for use in (lambda store: store.read("a"), lambda store: store.read("a", 0, 9), lambda store: list(store.list())):
        s3_proxy.forget()
        with pytest.raises(RemoteError, match=r"^s3://no-such-bucket/.*: there is no such bucket$"):
            use(Store("s3://no-such-bucket"))
        assert len(s3_proxy.asked) == 1
    for methods in (("GET",), ("GET", "HEAD")):
        s3_proxy.fault = lambda asked, methods=methods: 301 if asked.method in methods else None  # type: ignore[misc]
        s3_proxy.forget()
        with pytest.raises(RemoteError, match="another region: set AWS_DEFAULT_REGION"):
            Store(s3_bucket.url).read("a", 0, 9)
        assert s3_proxy.count("GET") <= 2, "the client itself asks once more"


class Deaf:
    """A server that takes connections, and nothing else."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self._socket.accept()[0])

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for one in self.taken:
            one.close()


@pytest.fixture
def deaf(s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaf]:
    server = Deaf()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(store_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(store_module, "WAITS_S", (0.01,) * 100)
    yield server
    server.close()


def test_a_server_that_never_answers_is_given_up(deaf: Deaf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_module, "SILENCE_S", 1.0)
    for use in (
        lambda store: store.read("a"),
        lambda store: store.size("a"),
        lambda store: list(store.list("a")),
        lambda store: store.get("a", tmp_path / "a"),
        lambda store: store.write("a", b"1"),
    ):
        with pytest.raises(RemoteError, match=r"^s3://bucket/a: no answer, asked (once|\d+ times)"):
            use(Store("s3://bucket"))


def test_an_upload_that_gets_stuck_is_given_up(deaf: Deaf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_module, "SILENCE_S", 0.5)
    monkeypatch.setattr(store_module, "SLOWEST", 64 << 20)
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    with pytest.raises(RemoteError, match=r"^s3://bucket/large: no answer, asked once"):
        Store("s3://bucket").put(tmp_path / "large", "large")


def test_what_moves_is_not_cut_by_the_bound_on_silence(s3_bucket: Bucket, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(store_module, "_CHUNK", 1 << 20)
    data = os.urandom(6 << 20)
    s3_bucket.fill({"a": data})
    s3_proxy.fault = lambda asked: "truncate" if asked.method == "GET" and asked.number % 3 else 0.4
    assert Store(s3_bucket.url).get("a", tmp_path / "a") == len(data)
    assert (tmp_path / "a").read_bytes() == data


def test_what_is_no_fault_of_a_store_is_raised_at_once(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        """As a signal handler may raise it."""

    asked = []

    def fail(*args: object, **more: object) -> None:
        asked.append(args)
        raise Stopped

    store = Store(s3_bucket.url)
    monkeypatch.setattr(store._files()[0], "cat_file", fail)
    with pytest.raises(Stopped):
        store.read("a")
    assert len(asked) == 1


def test_what_lies_in_the_memory_of_a_process_is_not_for_others() -> None:
    with pytest.raises(OptionError, match="memory of one process"):
        pickle.dumps(Store("memory://x"))


@pytest.mark.parametrize("place", ["s3:/bucket/out", "file:/data/out", "s3://", "gs:///", "file://data/out", "file://"])
def test_what_was_meant_to_be_a_url_is_no_folder(place: str) -> None:
    with pytest.raises(OptionError) as caught:
        store_module.on_disk(place)
    assert str(caught.value).startswith(f"{place}: ")
    assert "\n" not in str(caught.value)


def test_a_file_url_is_its_path() -> None:
    assert store_module.on_disk("file:///data/out") == store_module.on_disk("file://localhost/data/out") == "/data/out"
    for place in ("s3://bucket/out", "data/a:b/c", "./s3:/x", "file", "local", "file/x", "C:/data", "memory://"):
        assert store_module.on_disk(place) == place
