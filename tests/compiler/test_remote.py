from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.remote import RemoteSource, folder_source
from mmcompile.errors import OptionError, SourceError
from tests.compiler.builds import make_raw, picture, write
from tests.s3 import Bucket, Proxy


def files_of(raw: Path) -> dict[str, bytes]:
    return {str(p.relative_to(raw)): p.read_bytes() for p in raw.rglob("*") if p.is_file()}


ODD = {
    "cat/a b.png": 1,
    "cat/ü.PNG": 2,
    "cat/100%.png": 3,
    "cat/a+b#1.png": 4,
    "cat/[x]?.png": 5,
    "cat/deep/er/z.jpg": 6,
    "cat/naked": 7,
    "dog/.hidden.png": 8,
    "dog/x.txt": 9,
    "dog/Z.png": 10,
    "dog/a.png": 11,
    "10/1.png": 12,
    "9/1.png": 13,
    "9/excluded/2.png": 14,
    "direct.png": 15,
    "__MACOSX/cat.png": 16,
}


def test_an_object_store_is_listed_as_the_same_tree_on_a_disk(s3_bucket: Bucket, tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {name: picture(seed) for name, seed in ODD.items()} | {"cat/text": b"no image", "empty/note.txt": b""})
    url = s3_bucket.fill(files_of(raw), "deep/raw")
    for options in (
        {},
        {"hidden": True},
        {"include": ("cat/*", "9*")},
        {"exclude": ("9/excluded", "*Z.png", "nothing")},
        {"extensions": frozenset({".png"})},
    ):
        mine, theirs = RemoteSource(url, **options), FolderSource(str(raw), **options)  # type: ignore[arg-type]
        found, expected = mine.scan(), theirs.scan()
        assert list(found.keys) == list(expected.keys)
        assert (found.classes, found.left_out, found.warnings) == (expected.classes, expected.left_out, expected.warnings)
        assert np.array_equal(found.labels, expected.labels)  # type: ignore[arg-type]
        assert np.array_equal(found.stat["size"], expected.stat["size"])
        assert mine.identity() == theirs.identity()
        assert [mine.read(key) for key in found.keys] == [theirs.read(key) for key in found.keys]
        assert [mine.stat(key) for key in found.keys] == [tuple(row) for row in found.stat.tolist()]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_other_file_systems_are_listed_alike(kind: str, tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {name: picture(seed) for name, seed in ODD.items()})
    url = f"file://{raw}"
    if kind == "memory":
        import fsspec

        url = f"memory://{tmp_path.name}/raw"
        fs = fsspec.filesystem("memory")
        for name, data in files_of(raw).items():
            fs.pipe_file(f"{url}/{name}", data)
    found, expected = RemoteSource(url).scan(), FolderSource(str(raw)).scan()
    assert list(found.keys) == list(expected.keys)
    assert (found.classes, found.left_out) == (expected.classes, expected.left_out)
    assert [RemoteSource(url).read(key) for key in found.keys] == [FolderSource(str(raw)).read(key) for key in found.keys]
    assert [RemoteSource(url).stat(key) for key in found.keys] == [tuple(row) for row in found.stat.tolist()]


def test_listing_asks_for_no_object(s3_bucket: Bucket, s3_proxy: Proxy, tmp_path: Path) -> None:
    url = s3_bucket.fill(files_of(make_raw(tmp_path / "raw", 30)), "raw")
    s3_proxy.forget()
    assert len(RemoteSource(url).scan().keys) == 60
    assert {a.method for a in s3_proxy.asked} == {"GET"}
    assert len(s3_proxy.asked) == 5, "RAW, two classes, a folder in each"
    assert all("list-type=2" in a.path for a in s3_proxy.asked)


def test_reading_an_object_takes_two_requests_and_tells_what_it_was(s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    source = pickle.loads(pickle.dumps(RemoteSource(s3_bucket.fill({"a/1.png": b"123"}, "raw"))))
    s3_proxy.forget()
    assert source.read(b"a/1.png") == b"123"
    before = source.stat(b"a/1.png")
    assert [a.method for a in s3_proxy.asked] == ["GET", "HEAD"]
    s3_bucket.fill({"a/1.png": b"456"}, "raw")
    assert source.stat(b"a/1.png")[3] != before[3]


def test_an_object_that_changes_while_it_is_read_is_an_error(s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    source = RemoteSource(s3_bucket.fill({"a/1.png": b"123"}, "raw"))

    def change(asked: object) -> None:
        if s3_proxy.asked[-1].method == "HEAD":
            s3_bucket.fill({"a/1.png": b"longer"}, "raw")

    s3_proxy.fault = change
    with pytest.raises(OSError, match="changed while read"):
        source.read(b"a/1.png")
    with pytest.raises(FileNotFoundError):
        source.read(b"a/none.png")


def test_what_cannot_be_listed_is_one_line_at_once(s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    s3_bucket.fill({"a/1.txt": b"123"}, "raw")
    for url, words in (
        ("s3://no-such-bucket/raw", "no such bucket"),
        (s3_bucket.url + "/none", "no such bucket or folder"),
        (s3_bucket.url + "/raw", "no images"),
    ):
        with pytest.raises(SourceError, match=words):
            RemoteSource(url).scan()
    s3_proxy.fault = lambda asked: 403
    s3_proxy.forget()
    with pytest.raises(SourceError, match=r"cannot list RAW: s3:.*Forbidden"):
        RemoteSource(s3_bucket.url + "/raw").scan()
    assert len(s3_proxy.asked) == 1
    assert os.sep not in RemoteSource("memory://user:secret@x").location()


def test_a_file_url_is_the_folder_that_it_is(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"cat/1.png": picture(1), "dog/2.png": picture(2)})
    (raw / "linked").symlink_to(raw / "dog")
    os.mkfifo(raw / "cat" / "x.png")
    os.mkfifo(raw / "cat" / "pipe")
    expected = FolderSource(str(raw)).scan()
    for scheme in ("file", "local"):
        source = folder_source(f"{scheme}://{raw}")
        assert source == FolderSource(str(raw))
        assert list(source.scan().keys) == list(expected.keys) == [b"cat/1.png", b"dog/2.png", b"linked/2.png"]
    assert expected.left_out["not a regular file"] == 2


def test_what_is_neither_file_nor_folder_is_left_out(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"cat/1.png": picture(1)})
    os.mkfifo(raw / "cat" / "x.png")
    os.mkfifo(raw / "cat" / "pipe")
    found = RemoteSource(f"file://{raw}").scan()
    assert list(found.keys) == [b"cat/1.png"]
    assert found.left_out == {"not a regular file": 2}


def test_an_empty_object_is_not_asked_for(s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    url = s3_bucket.fill({"_SUCCESS": b"", "a/1.png": picture(1), "a/_SUCCESS": b"", "a/naked": picture(2)}, "raw")
    found = RemoteSource(url).scan()
    assert list(found.keys) == [b"a/1.png", b"a/naked"]
    assert found.left_out == {"no extension, no image": 2}
    assert not s3_proxy.count("GET", "_SUCCESS")


def test_an_empty_part_in_a_name_is_counted_and_in_a_url_refused(s3_bucket: Bucket) -> None:
    url = s3_bucket.fill({"a/1.png": picture(1), "a//2.png": picture(2), "a//b/3.png": picture(3), "/4.png": picture(4), "a/": b""}, "raw")
    found = RemoteSource(url).scan()
    assert list(found.keys) == [b"a/1.png"]
    assert found.left_out == {"empty part in the name": 2}
    for odd in ("//raw", "/./raw", "/raw/../other"):
        with pytest.raises(OptionError, match=f"^{s3_bucket.url}{odd}: its path has "):
            folder_source(s3_bucket.url + odd)
