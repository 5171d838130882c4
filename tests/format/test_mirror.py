from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.errors import CorruptShardError, NotADatasetError, OptionError, RemoteError
from mmcompile.format.describe import describe
from mmcompile.format.index import Index
from mmcompile.format.npy import file_name
from mmcompile.format.prune import prune
from mmcompile.format.sampletable import samples_table
from mmcompile.format.verify import verify
from mmcompile.summary import verify_lines
from tests.format.builders import file_of
from tests.s3 import Bucket, Proxy
from tests.support import make_dataset


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two generations of shards of 4 images."""
    root = tmp_path / "out"
    images = np.arange(12 * 3 * 8 * 8, dtype=np.uint8).reshape(12, 3, 8, 8)
    make_dataset(root, images[::-1], range(12), shards=(4, 4, 4))
    make_dataset(root, images, [i % 3 for i in range(12)], shards=(4, 4, 4))
    return root


@pytest.fixture
def url(root: Path, s3_bucket: Bucket) -> str:
    return s3_bucket.fill(files_of(root), "out")


def test_info_of_a_url_is_that_of_the_folder_and_fetches_no_image(root: Path, url: str, s3_proxy: Proxy) -> None:
    found, expected = describe(url), describe(root)
    assert found["root"] == url
    for name in set(expected) - {"root", "generations", "repeats"}:
        assert found[name] == expected[name], name
    assert [g["name"] for g in found["generations"]] == [g["name"] for g in expected["generations"]]
    assert not [a for a in s3_proxy.asked if "image-" in a.path or "samples-" in a.path]
    assert list(samples_table(url)) == list(samples_table(root))


def test_info_of_a_url_counts_missing_files_without_another_request(root: Path, url: str, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    assert describe(url)["missing"] == 0
    asked = len(s3_proxy.asked)
    s3_bucket.delete(f"out/shards/{file_of(root, 'image', 0).name}")
    assert describe(url)["missing"] == 1
    assert len(s3_proxy.asked) <= 2 * asked


def test_verify_of_a_url_fetches_each_file_once_and_names_bad_rows(root: Path, url: str, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    report = verify(url)
    assert (report.ok, report.root, report.files, report.bytes) == (True, url, verify(root).files, verify(root).bytes)
    asked = [a.path.split("?")[0] for a in s3_proxy.asked if a.method == "GET" and a.path.endswith(".npy")]
    assert sorted(asked) == sorted(set(asked))
    image = next(p for p in sorted((root / "shards").iterdir()) if p.name.startswith("image-"))
    data = bytearray(image.read_bytes())
    data[4096 + 3 * 8 * 8 * 2] ^= 1
    image.write_bytes(data)
    s3_bucket.fill({f"shards/{image.name}": bytes(data)}, "out")
    short = next(p for p in (root / "shards").iterdir() if p.name.startswith("label-"))
    short.write_bytes(short.read_bytes()[:-8])
    s3_bucket.fill({f"shards/{short.name}": short.read_bytes()}, "out")
    gone = next(p for p in (root / "shards").iterdir() if p.name.startswith("keys-"))
    gone.unlink()
    s3_bucket.delete(f"out/shards/{gone.name}")
    assert [p.message for p in verify(url).problems] == [p.message for p in verify(root).problems]
    assert len(verify(url).problems) >= 3


def test_prune_of_a_url_deletes_what_it_deletes_in_the_folder(root: Path, url: str, s3_bucket: Bucket) -> None:
    s3_bucket.fill({"shards/mine.txt": b"mine", "shards/image-" + "0" * 32 + ".npy": b"not its hash"}, "out")
    (root / "shards" / "mine.txt").write_bytes(b"mine")
    (root / "shards" / ("image-" + "0" * 32 + ".npy")).write_bytes(b"not its hash")
    listed = prune(url, delete=False)
    expected = prune(root, delete=False)
    assert (listed.root, sorted(listed.files), listed.others, len(listed.generations)) == (url, sorted(expected.files), expected.others, 1)
    assert set(s3_bucket.files("out")) == set(files_of(root))
    assert prune(url, delete=True).deleted
    prune(root, delete=True)
    assert set(s3_bucket.files("out")) == set(files_of(root)) - {".build/lock"}
    assert verify(url).ok


def test_errors_name_the_url(s3_bucket: Bucket) -> None:
    from mmcompile.compiler.repair import repair

    for use in (describe, verify, lambda url: prune(url, delete=True), lambda url: list(samples_table(url))):
        with pytest.raises(NotADatasetError, match=f"^{s3_bucket.url}/none: no"):
            use(s3_bucket.url + "/none")
        with pytest.raises(RemoteError, match=r"^s3://no-such-bucket/out.*: there is no such bucket$"):
            use("s3://no-such-bucket/out")
    with pytest.raises(OptionError, match="copy it to a folder"):
        repair(s3_bucket.url, "raw")


def test_the_remedy_for_a_url_is_one_that_works(root: Path, url: str, s3_bucket: Bucket) -> None:
    index = Index.from_bytes((root / "index.json").read_bytes(), root)
    table = file_name("table", index.table)
    s3_bucket.delete(f"out/shards/{table}")
    for use in (describe, lambda url: prune(url, delete=True)):
        with pytest.raises(CorruptShardError, match=rf"^{url}/shards/{table}: missing; run `mmcompile verify {url}`, which says how to mend it$"):
            use(url)


def test_a_full_disk_here_names_the_folder_that_is_full(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("store.Store.get", "mirror.make_stub"):
        with monkeypatch.context() as patch:
            patch.setattr(f"mmcompile.format.{name}", full)
            with pytest.raises(OSError, match="No space left") as error:
                describe(url)
            assert type(error.value) is OSError
            if name == "store.Store.get":
                assert str(error.value.filename).startswith(str(tmp_path))


def test_what_is_no_folder_of_ours_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = tmp_path / f"mmcompile-{os.getuid()}"
    (tmp_path / "other").mkdir()
    for make in (lambda: base.write_bytes(b"mine"), lambda: base.symlink_to(tmp_path / "other"), lambda: base.symlink_to("nowhere")):
        make()
        with pytest.raises(RemoteError, match=rf"^{base}: belongs to someone else, or is no folder; remove it, or set TMPDIR to another folder$"):
            describe(url)
        base.unlink()
    assert not list((tmp_path / "other").iterdir())
    describe(url)


def test_problems_of_a_url_name_it(root: Path, url: str, s3_bucket: Bucket) -> None:
    generation = next(p.name for p in (root / "generations").iterdir() if p.read_bytes() != (root / "index.json").read_bytes())
    s3_bucket.fill({f"generations/{generation}": b"[]" * (9 << 20)}, "out")
    report = verify(url)
    messages = [p.message for p in report.problems]
    assert messages
    assert "to mend it from the sources, copy the dataset to a disk and run `mmcompile verify FOLDER --repair RAW` there" in verify_lines(
        report.to_json()
    )
    assert not [message for message in messages if "/mmcompile-" in message]


def test_values_of_a_url_stay_there_and_its_names_and_groups_do_not(tmp_path: Path, s3_bucket: Bucket, s3_proxy: Proxy) -> None:
    root = tmp_path / "table"
    values = {"x": np.ones((3000, 257), np.float32), "t": np.arange(3000)}
    columns = tuple(f"c{i}" for i in range(257))
    make_dataset(root, values=values, facts={"x": {"columns": columns}}, keyed=False, groups=[("A", 10), ("B", 3000)], shards=(1000, 2000))
    url = s3_bucket.fill(files_of(root), "table")
    found, expected = describe(url), describe(root)
    assert {name: found[name] for name in ("fields", "groups", "keys", "bytes")} == {
        name: expected[name] for name in ("fields", "groups", "keys", "bytes")
    }
    assert not [a for a in s3_proxy.asked if any(f"shards/{kind}-" in a.path for kind in ("x", "t", "hashes"))]
    assert list(samples_table(url)) == list(samples_table(root))
    assert verify(url).ok
    path = file_of(root, "x", 1)
    data = bytearray(path.read_bytes())
    data[4096 + 1028 * 1010] ^= 1
    path.write_bytes(data)
    (problem,) = verify(s3_bucket.fill(files_of(root), "bad")).problems
    assert (problem.what, problem.start, problem.bad_rows) == ("x", 1000, 1012)
    assert prune(url, delete=False).files == ()
