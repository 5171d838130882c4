"""Images in tar archives, read in place: samples as WebDataset has them, and what a hostile or damaged archive makes of it."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler.sources.archive import ArchiveSource
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.format.reader import Reader
from tests.compiler.builds import age, dataset, images, keys, picture, run

Files = Iterable[tuple[str, bytes]]


def entry(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


def tar(path: Path, files: Files, format: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files:
            archive.addfile(entry(name, len(data)), io.BytesIO(data))
    return path


def pairs(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    """Samples with a class and a record each."""
    out = []
    for i in range(start, start + count):
        out += [(f"{i:06}.png", picture(i)), (f"{i:06}.cls", str(i % 3).encode()), (f"{i:06}.json", json.dumps({"x": i, "y": i / 2}).encode())]
    return out


def source(*raw: Path, **more: Any) -> ArchiveSource:
    found = open_source([str(path) for path in raw], SourceOptions(**more))
    assert isinstance(found, ArchiveSource)
    return found


def test_the_real_layout_holds_what_its_note_says(tmp_path: Path) -> None:
    layouts = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if layouts is None:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    root = Path(layouts, "webdataset")
    note = json.loads((root / "expected.json").read_bytes())
    scan = source(root).scan()
    assert len(scan.keys) == note["samples"]
    assert len({key.split(b"/")[0] for key in scan.keys}) == note["shards"]
    assert scan.labels is not None
    assert int((scan.labels == -1).sum()) == note["without_label"]
    assert b"shard-000001.tar/dir/with.dot.jpg" in list(scan.keys)
    assert any("no .cls" in warning and "shard-000001.tar/000005 (byte " in warning for warning in scan.warnings)
    with tarfile.open(root / "shard-000000.tar") as archive:
        for member in archive:
            if member.name.endswith(".jpg"):
                at = list(scan.keys).index(f"shard-000000.tar/{member.name}".encode())
                content = archive.extractfile(member)
                assert content is not None
                assert source(root).read(scan.keys[at]) == content.read()
    out = tmp_path / "out"
    run(root, out, rows=4)
    assert len(Reader(out)) == note["samples"]


def test_a_build_of_an_archive_holds_its_images_classes_and_numbers(tmp_path: Path) -> None:
    raw = tar(tmp_path / "raw/a.tar", pairs(7))
    out = tmp_path / "out"
    run(raw, out)
    reader = Reader(out)
    assert keys(out) == [f"{i:06}.png".encode() for i in range(7)]
    assert reader.gather("label", np.arange(7)).tolist() == [i % 3 for i in range(7)]
    assert reader.gather("x", np.arange(7)).dtype == np.int64
    assert reader.gather("x", np.arange(7)).tolist() == list(range(7))
    assert reader.gather("y", np.arange(7)).tolist() == [i / 2 for i in range(7)]
    for name, data in pairs(7):
        if name.endswith(".png"):
            path = tmp_path / "files" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
    run(tmp_path / "files", tmp_path / "plain")
    assert np.array_equal(images(out), images(tmp_path / "plain"))


def test_a_folder_of_archives_and_the_archives_are_the_same(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    a, b = tar(raw / "a.tar", pairs(4)), tar(raw / "b.tar", pairs(4, 10))
    run(raw, tmp_path / "one")
    run(source(b, a), tmp_path / "two")
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")
    assert keys(tmp_path / "one")[0] == b"a.tar/000000.png"


def test_a_rebuild_of_an_unchanged_archive_reads_nothing_and_of_a_packed_anew_decodes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tar(tmp_path / "a.tar", pairs(6))
    out = tmp_path / "out"
    run(raw, out)
    age(tmp_path)
    tar(raw, pairs(6))  # its times count from now on
    os.utime(raw, ns=(1, 10**18))
    before = dataset(out)
    report = run(raw, out)
    assert report.decoded == 0
    assert dataset(out) == before
    anew = list(reversed(pairs(6)))
    tar(raw, anew, tarfile.PAX_FORMAT)
    report = run(raw, out)
    assert report.decoded == 0
    assert report.copied == 6
    run(raw, tmp_path / "clean")
    assert dataset(out) == dataset(tmp_path / "clean")
