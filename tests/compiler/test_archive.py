"""Images in tar archives, read in place: samples as WebDataset has them, and what a hostile or damaged archive makes of it."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import statcache
from mmcompile.compiler.repair import repair
from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.archive import ArchiveSource
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import MMCompileError, OptionError, OutputExistsError, SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import BROKEN, age, dataset, images, inline, keys, make_raw, picture, run, snapshot, write

Files = Iterable[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


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


def test_a_build_of_an_archive_holds_its_images_classes_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # workers are processes
    raw = tar(tmp_path / "raw/a.tar", pairs(7))
    out = tmp_path / "out"
    run(raw, out, workers=2)
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


# ---------------------------------------------------------------- samples


def test_members_of_a_sample_need_not_stand_together(tmp_path: Path) -> None:
    apart = sorted(pairs(5), key=lambda file: file[0][-4:])
    run(tar(tmp_path / "together/a.tar", pairs(5)), tmp_path / "one")
    run(tar(tmp_path / "apart/a.tar", apart), tmp_path / "two")
    one, two = Reader(tmp_path / "one"), Reader(tmp_path / "two")
    for name in ("image", "label", "x", "y"):
        assert np.array_equal(one.gather(name, np.arange(5)), two.gather(name, np.arange(5)))


def test_a_key_ends_at_the_first_dot_behind_the_last_slash(tmp_path: Path) -> None:
    files = [("d.0/with.dot.png", picture(0)), ("d.0/with.dot.cls", b"1"), ("d.0/other.png", picture(1)), ("d.0/other.cls", b"0")]
    scan = source(tar(tmp_path / "a.tar", files)).scan()
    assert list(scan.keys) == [b"d.0/with.dot.png", b"d.0/other.png"]
    assert scan.labels is not None
    assert scan.labels.tolist() == [1, 0]
    assert scan.classes == ("0", "1")


def test_partners_that_are_missing_are_named(tmp_path: Path) -> None:
    files = [("a.png", picture(0)), ("a.cls", b"1"), ("b.cls", b"0"), ("c.png", picture(1)), ("b.txt", b"x")]
    scan = source(tar(tmp_path / "a.tar", files)).scan()
    assert scan.labels is not None
    assert scan.labels.tolist() == [1, -1]
    assert scan.left_out == {"extension .txt": 1, "sample without an image": 1}
    assert any(w.startswith("samples without an image are left out: 1, as b (byte ") for w in scan.warnings)
    assert any(w.startswith("1 sample has no .cls: label -1 (c (byte ") for w in scan.warnings)


def test_of_several_images_the_first_as_text_is_taken_and_another_can_be_chosen(tmp_path: Path) -> None:
    files = [("a.z.png", picture(1)), ("a.b.png", picture(2)), ("a.cls", b"0")]
    raw = tar(tmp_path / "a.tar", files)
    scan = source(raw).scan()
    assert list(scan.keys) == [b"a.b.png"]
    assert scan.left_out == {"further image of a sample": 1}
    assert any(w.startswith("1 image beside another of the same sample left out") for w in scan.warnings)
    scan = source(raw, exclude=("*.b.png",)).scan()
    assert list(scan.keys) == [b"a.z.png"]
    assert scan.left_out == {"excluded": 1}
    assert source(raw).read(scan.keys[0]) == picture(1)
    assert list(source(raw, image_column="z.png").scan().keys) == [b"a.z.png"]
    assert "--exclude nope* matches nothing" in source(raw, exclude=("nope*",)).scan().warnings
    with pytest.raises(OptionError, match=r"--image-column jpg: samples have no such image \(they have b\.png, z\.png\)"):
        source(raw, image_column="jpg").scan()


def test_classes_are_numbers_or_names(tmp_path: Path) -> None:
    def labels(*texts: bytes, **more: Any) -> tuple[list[int], Any]:
        files = [file for i, text in enumerate(texts) for file in ((f"{i}.png", b"x"), (f"{i}.cls", text))]
        scan = source(tar(tmp_path / "a.tar", files), **more).scan()
        assert scan.labels is not None
        return scan.labels.tolist(), scan.classes

    assert labels(b"2", b"0\n") == ([2, 0], ("0", "1", "2"))
    assert labels(b"dog", b"cat", b"dog") == ([1, 0, 1], ("cat", "dog"))
    assert labels(b"-1", b"1") == ([-1, 1], ("0", "1"))
    assert labels(b"900000000000", b"5") == ([1, 0], ("5", "900000000000"))
    names = tmp_path / "names"
    names.write_text("dog\ncat\nbird\n")
    assert labels(b"cat", b"dog", classes_from=str(names)) == ([1, 0], ("dog", "cat", "bird"))
    assert labels(b"2", b"1", classes_from=str(names)) == ([2, 1], ("dog", "cat", "bird"))
    with pytest.raises(SourceError, match=r"\.cls fish \(0\.png\) is not among the 3 names of --classes-from"):
        labels(b"fish", classes_from=str(names))
    with pytest.raises(SourceError, match="expected numbers below 3"):
        labels(b"3", classes_from=str(names))
    with pytest.raises(SourceError, match=r"\.cls members hold .*: expected the number or name of a class"):
        labels(b"0.5", b"1")


def test_records_become_fields_and_what_does_not_is_told(tmp_path: Path) -> None:
    records = [
        {"Width": 3, "score": 0.5, "ok": True, "text": "a", "box": [1, 2], "label": 1},
        {"Width": 4, "score": 2, "ok": False, "text": "b", "gap": 7, "label": 0},
    ]
    files = [file for i, record in enumerate(records) for file in ((f"{i}.png", b"x"), (f"{i}.json", json.dumps(record).encode()))]
    scan = source(tar(tmp_path / "a.tar", files)).scan()
    assert {f.name: f.dtype for f in scan.fields} == {"label": "int64", "width": "int64", "score": "float64", "ok": "bool", "gap": "float64"}
    assert scan.values["width"].tolist() == [3, 4]
    assert scan.values["score"].tolist() == [0.5, 2.0]
    assert scan.values["ok"].tolist() == [True, False]
    assert np.isnan(scan.values["gap"][0])
    assert scan.values["label"].tolist() == [1, 0]
    assert any("gap" in w and "missing" in w for w in scan.warnings)
    assert scan.counts == {
        "values of text in .json left out (text); --columns takes them as categories": 1,
        "values of several parts in .json left out (box)": 1,
    }


def test_fields_and_label_can_be_chosen(tmp_path: Path) -> None:
    records = [{"kind": "b", "x": 1, "box": [1]}, {"kind": "a", "x": 2, "box": [2]}]
    files = [file for i, r in enumerate(records) for file in ((f"{i}.png", b"x"), (f"{i}.json", json.dumps(r).encode()), (f"{i}.cls", b"7"))]
    raw = tar(tmp_path / "a.tar", files)
    scan = source(raw, label_column="kind").scan()
    assert scan.classes == ("a", "b")
    assert scan.values["label"].tolist() == [1, 0]
    assert scan.values["x"].tolist() == [1, 2]
    assert source(raw, label_column="cls").scan().values["label"].tolist() == [7, 7]
    assert [f.name for f in source(raw, label_column="none").scan().fields] == ["x"]
    scan = source(raw, columns=("kind",)).scan()
    assert [f.name for f in scan.fields] == ["label", "kind"]
    assert scan.values["kind"].tolist() == [1, 0]
    assert [f.name for f in source(raw, columns=()).scan().fields] == ["label"]
    for more, why in (({"columns": ("box",)}, "values of several parts"), ({"columns": ("Kind",)}, "did you mean kind")):
        with pytest.raises(OptionError, match=why):
            source(raw, **more).scan()
    with pytest.raises(OptionError, match="no image has a class or a record beside it"):
        source(tar(tmp_path / "b.tar", [("a.png", b"x")]), label_column="kind").scan()


def test_a_value_that_is_none_like_others_is_named(tmp_path: Path) -> None:
    def scan(name: str, scores: list[Any], classes: bytes, **options: Any) -> Scan:
        files = [(f"{i}.json", json.dumps({"score": score}).encode()) for i, score in enumerate(scores)]
        files += [(f"{i}.{kind}", data) for i, c in enumerate(classes) for kind, data in (("png", b"x"), ("cls", bytes([c])))]
        return source(tar(tmp_path / name, files), **options).scan()

    found = scan("a.tar", [1, "?", 3], b"12x")
    assert found.classes == ("1", "2", "x")
    said = "{}: 2.png: 'x' is no value like others in it, so that all of them are names of classes, in their order as text"
    assert found.warnings == (said.format(".cls"), ".json value score is left out: 1.png: '?' is no value like others in it: mend it")
    with pytest.raises(OptionError, match=r"--columns score: .*: 1\.png: '\?' is no value like others in it"):
        scan("b.tar", [1, "?", 3], b"123", columns=("score",))
    assert scan("c.tar", ["1", "?", "3"], b"123", columns=("score",)).values["score"].tolist() == [0, 2, 1]


def test_records_are_read_as_lines_of_json_are(tmp_path: Path) -> None:
    scan = source(tar(tmp_path / "a.tar", [("0.png", b"x"), ("0.json", b'{"score": 1e999, "x": 1}')])).scan()
    assert [f.name for f in scan.fields] == ["x"]
    assert scan.warnings == (".json value score is left out: a number is beyond float64: 1E+999 (0.png)",)
    with pytest.raises(SourceError, match=r"a \.json member: 'x' stands in it twice"):
        source(tar(tmp_path / "b.tar", [("0.png", b"x"), ("0.json", b'{"x": 1, "x": 2}')])).scan()


def test_splits_are_folders_of_archives_or_named(tmp_path: Path) -> None:
    for split, start in (("test", 0), ("train", 10), ("val", 20)):
        tar(tmp_path / f"raw/{split}/0.tar", pairs(3, start))
    scan = source(tmp_path / "raw").scan()
    assert [(s.name, s.start, s.stop) for s in scan.splits] == [("train", 0, 3), ("val", 3, 6), ("test", 6, 9)]
    assert scan.keys[0] == b"train/0.tar/000010.png"
    assert scan.values["x"].tolist() == [10, 11, 12, 20, 21, 22, 0, 1, 2]
    assert source(tmp_path / "raw").read(scan.keys[8]) == picture(2)
    for split, start in (("test", 0), ("train", 10)):
        tar(tmp_path / f"flat/{split}-0.tar", pairs(3, start))
    flat = source(tmp_path / "flat").scan()
    assert flat.splits == ()
    assert any("--split train='*train*' --split test='*test*'" in w for w in flat.warnings)
    named = source(tmp_path / "flat", split=("train=train-*", "b=test-0.tar")).scan()
    assert [(s.name, s.start, s.stop) for s in named.splits] == [("train", 0, 3), ("b", 3, 6)]
    several = [tmp_path / "flat/train-0.tar", tmp_path / "flat/test-0.tar"]
    again = source(*several, split=(f"train={several[0]}", f"b={several[1]}")).scan()
    assert again.keys == named.keys
    assert again.splits == named.splits
    with pytest.raises(SourceError, match=r"--split val=nope: no archive is called so \(there is test-0.tar\)"):
        source(tmp_path / "flat", split=("val=nope",)).scan()
    out = tmp_path / "out"
    run(source(tmp_path / "raw"), out)
    assert [s.name for s in Reader(out).index.splits] == ["train", "val", "test"]


def test_a_tar_of_class_folders_is_what_the_folder_is(tmp_path: Path) -> None:
    raw = make_raw(tmp_path / "raw")
    (raw / "empty").mkdir()
    (raw / "cat/note.txt").write_text("x")
    (raw / "cat/noext").write_bytes(picture(77))
    (raw / "cat/junk").write_bytes(b"nothing")
    (raw / ".hidden").mkdir()
    (raw / ".hidden/a.png").write_bytes(picture(0))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(raw, ".")
    run(raw, tmp_path / "one")
    run(source(tmp_path / "a.tar"), tmp_path / "two")
    assert dataset_but_settings(tmp_path / "one") == dataset_but_settings(tmp_path / "two")
    folder, packed = FolderSource(str(raw)).scan(), source(tmp_path / "a.tar").scan()
    assert folder.classes == packed.classes == ("cat", "dog", "empty")
    assert {**folder.left_out} == packed.left_out
    zipped(tmp_path / "a.zip", raw)
    run(source(tmp_path / "a.zip"), tmp_path / "three")
    assert dataset_but_settings(tmp_path / "one") == dataset_but_settings(tmp_path / "three")
    assert source(tmp_path / "a.zip").scan().left_out == packed.left_out


def dataset_but_settings(out: Path) -> dict[str, bytes]:
    """The shards: their names say what is in them."""
    return {name: data for name, data in dataset(out).items() if name.startswith("shards/") and "table" not in name}


def zipped(path: Path, raw: Path, method: int = zipfile.ZIP_DEFLATED, top: str = "") -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for folder, _, names in sorted(os.walk(raw)):
            inside = os.path.relpath(folder, raw)
            if inside != ".":
                archive.write(folder, top + inside)
            for name in names:
                archive.write(os.path.join(folder, name), top + os.path.join(inside, name))
    return path


def packed(path: Path, raw: Path, top: str) -> Path:
    """A tar or zip, by the name, of what is in a folder, below `top`."""
    if path.suffix == ".zip":
        return zipped(path, raw, top=top)
    with tarfile.open(path, "w") as archive:
        archive.add(raw, top)
    return path


@pytest.mark.parametrize("name", ["a.tar", "a.zip"])
@pytest.mark.parametrize("splits", [False, True])
def test_one_outer_folder_is_no_class_but_those_in_it_are(tmp_path: Path, name: str, splits: bool) -> None:
    raw = tmp_path / "raw"
    for part in ("train", "val") if splits else (".",):
        make_raw(raw / part, 4)
    (raw / "train" / "empty" if splits else raw / "empty").mkdir()
    path = packed(tmp_path / name, raw, "photos/")
    folder, scan = FolderSource(str(raw)).scan(), source(path).scan()
    assert list(scan.keys) == [b"photos/" + key for key in folder.keys]
    assert (scan.classes, scan.splits, scan.counts) == (folder.classes, folder.splits, folder.counts)
    assert np.array_equal(scan.values, folder.values)
    assert scan.warnings[0].startswith("all images lie in one folder, photos, which is no class")
    run(raw, tmp_path / "one", rows=1000)
    run(source(path), tmp_path / "two", rows=1000)
    assert np.array_equal(images(tmp_path / "one"), images(tmp_path / "two"))
    as_class = source(path, split=("all=.",)).scan()
    assert (as_class.classes, as_class.splits) == (("photos",), ())
    (tmp_path / "names").write_text("photos\n")
    assert source(path, classes_from=str(tmp_path / "names")).scan().classes == ("photos",)
    (tmp_path / "many").mkdir()
    both = [packed(tmp_path / "many" / f"{i}{path.suffix}", raw, "photos/") for i in range(2)]
    scan = source(tmp_path / "many").scan()
    assert (scan.classes, len(scan.keys)) == (folder.classes, 2 * len(folder.keys))
    assert scan.keys[0].startswith(both[0].name.encode() + b"/photos/")


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (("photos/cat/1.png",), ("photos",)),  # one kind of photos, or photos of one class
        (("photos/cat/1.png", "photos/2.png", "photos/dog/3.png"), ("photos",)),
        (("photos/cat/1.png", "other/cat/2.png"), ("other", "photos")),
        (("photos/cat/1.png", "photos/dog/2.png", "3.png"), ("photos",)),
        (("photos/train/1.png",), None),
        (("photos/train/a/1.png", "photos/x/b/2.png"), ("train", "x")),
    ],
)
def test_what_an_outer_folder_is_follows_from_all_images(tmp_path: Path, names: tuple[str, ...], classes: tuple[str, ...] | None) -> None:
    path = tar(tmp_path / "a.tar", [(name, b"x") for name in names])
    assert source(path).scan().classes == classes


def test_archives_of_folders_have_one_class_map(tmp_path: Path) -> None:
    (tmp_path / "zips").mkdir()
    make_raw(tmp_path / "train", 3, ("cat", "dog"))
    make_raw(tmp_path / "val", 2, ("bird", "dog"), 50)
    for split in ("train", "val"):
        zipped(tmp_path / f"zips/{split}.zip", tmp_path / split)
    scan = source(tmp_path / "zips").scan()
    assert scan.classes == ("bird", "cat", "dog")
    assert len(scan.keys) == 10
    assert scan.keys[0] == b"val.zip/bird/0.png"
    named = source(tmp_path / "zips", split=("train=train.zip", "val=val.zip")).scan()
    assert [(s.name, s.start, s.stop) for s in named.splits] == [("train", 0, 6), ("val", 6, 10)]
    assert sorted(named.keys) == sorted(scan.keys)


def test_a_real_zip_is_the_folder(tmp_path: Path) -> None:
    layouts = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if layouts is None:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    raw = Path(layouts, "imagefolder")
    zipped(tmp_path / "a.zip", raw)
    folder, packed = FolderSource(str(raw)).scan(), source(tmp_path / "a.zip").scan()
    assert packed.keys == folder.keys
    assert packed.classes == folder.classes
    assert packed.splits == folder.splits
    assert np.array_equal(packed.values, folder.values)
    for key in packed.keys:
        assert source(tmp_path / "a.zip").read(key) == (raw / os.fsdecode(key)).read_bytes()


def test_what_raw_is_decides(tmp_path: Path) -> None:
    tar(tmp_path / "mixed/a.tar", pairs(2))
    assert isinstance(open_source([str(tmp_path / "mixed")], SourceOptions()), ArchiveSource)
    (tmp_path / "mixed/README").write_text("x")
    assert source(tmp_path / "mixed").scan().left_out == {"beside archives": 1}
    write(tmp_path / "mixed", {"cat/a.png": picture(0)})
    with pytest.raises(SourceError, match=r"holds 1 image and 1 archive \(.tar\): say which of them are meant with --source folder or --source tar"):
        open_source([str(tmp_path / "mixed")], SourceOptions())
    write(tmp_path / "mixed", {"cat/b.png": picture(1)})
    assert isinstance(open_source([str(tmp_path / "mixed")], SourceOptions()), FolderSource)
    assert len(source(tmp_path / "mixed", source="tar").scan().keys) == 2
    write(tmp_path / "other", {"note/a.txt": b"", "a.zip": b""})
    with pytest.raises(SourceError, match="--source zip reads archives that lie beside other things"):
        open_source([str(tmp_path / "other")], SourceOptions()).scan()
    with pytest.raises(OptionError, match=r"s3://b/a\.tar: archives are read in place, from a disk"):
        open_source(["s3://b/a.tar"], SourceOptions())
    with pytest.raises(SourceError, match="was given twice"):
        source(tmp_path / "mixed/a.tar", tmp_path / "mixed/a.tar")
    with pytest.raises(SourceError, match="is a folder: give archives, or one folder"):
        source(tmp_path / "mixed/a.tar", tmp_path / "mixed", source="tar")
    apart = source(tar(tmp_path / "far/b.tar", [("c/a.png", b"x")]), tar(tmp_path / "c.tar", [("c/a.png", b"x")]))
    with pytest.raises(SourceError, match="lie in different folders"):
        apart.scan()


def test_rows_in_a_random_order_are_the_same_rows(tmp_path: Path) -> None:
    for raw in (tar(tmp_path / "a.tar", pairs(8)), zip_of(tmp_path / "b.zip", [(f"c/{i}.png", picture(i)) for i in range(8)])):
        run(source(raw), tmp_path / f"plain-{raw.name}")
        run(source(raw), tmp_path / f"mixed-{raw.name}", options={"order": "shuffled:3"})
        plain, mixed = keys(tmp_path / f"plain-{raw.name}"), keys(tmp_path / f"mixed-{raw.name}")
        assert sorted(plain) == sorted(mixed)
        assert plain != mixed
        assert np.array_equal(images(tmp_path / f"mixed-{raw.name}"), images(tmp_path / f"plain-{raw.name}")[[plain.index(key) for key in mixed]])


def test_a_zip_builds_in_processes_as_the_folder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    raw = make_raw(tmp_path / "raw")
    run(raw, tmp_path / "one")
    run(source(zipped(tmp_path / "a.zip", raw)), tmp_path / "two", workers=2)
    assert dataset_but_settings(tmp_path / "one") == dataset_but_settings(tmp_path / "two")


def test_parts_of_a_plan_take_its_settings(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", pairs(6))
    more = {"exclude": ("000003.png",)}
    run(source(raw, **more), tmp_path / "clean")
    run(source(raw, **more), tmp_path / "out", options={"plan_only": True})
    for i in range(2):
        run(source(raw), tmp_path / "out", options={"part": f"{i}/2"})
    with pytest.raises(OptionError, match="a part is built as it was planned"):
        run(source(raw, include=("*",)), tmp_path / "out", options={"part": "0/2"})
    with pytest.raises(OptionError, match="a part is built as it was planned"):
        run(make_raw(tmp_path / "folder"), tmp_path / "out", options={"part": "0/2"})
    run(source(raw, **more), tmp_path / "out")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_damage_is_mended_by_the_build_that_made_it(tmp_path: Path) -> None:
    raw = tar(tmp_path / "raw/a.tar", pairs(4))
    run(source(raw), tmp_path / "out")
    before = dataset(tmp_path / "out")
    path = next((tmp_path / "out/shards").glob("image-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not verify(tmp_path / "out").repair
    with pytest.raises(OptionError, match=r"it was not built from one folder of images.*delete the files that `mmcompile verify` names"):
        repair(tmp_path / "out", tmp_path / "raw")
    path.unlink()
    run(source(raw), tmp_path / "out")
    assert dataset(tmp_path / "out") == before
    assert verify(tmp_path / "out").ok


# ---------------------------------------------------------------- reading


def test_a_source_pickles_without_descriptors_and_reads_by_the_place_in_a_key(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", pairs(3))
    first = source(raw)
    scan = first.scan()
    key = scan.keys[1]
    assert first.read(key) == picture(1)
    copy, key = pickle.loads(pickle.dumps((first, key)))
    assert copy == first
    assert copy.read(key) == picture(1)
    assert copy.stat(key) == tuple(scan.stat[1].tolist())
    with pytest.raises(LookupError):
        copy.read(bytes(key))


def test_descriptors_are_few_and_closed_at_the_end(tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return [to for link in links if os.path.lexists(link) and (to := os.readlink(link)).startswith(str(tmp_path))]

    for i in range(40):
        tar(tmp_path / f"raw/{i:02}.tar", pairs(1, i))
    found = source(tmp_path / "raw")
    keys = found.scan().keys
    assert [found.read(key) for key in keys] == [picture(i) for i in range(40)]
    assert 0 < len(opened()) < 20
    del found
    gc.collect()
    assert opened() == []


def test_an_archive_that_changed_is_no_other_picture(tmp_path: Path) -> None:
    for path, make in ((tmp_path / "a.tar", tar), (tmp_path / "a.zip", zip_of)):
        files = [(f"c/{i}.png", picture(i)) for i in range(3)]
        make(path, files)
        found = source(path)
        keys = found.scan().keys
        assert found.read(keys[2]) == picture(2)
        make(path, [(f"c/{i}.png", picture(i)) for i in range(5, 9)])
        with pytest.raises(OSError, match="changed since it was listed"):
            found.read(keys[2])
        path.unlink()
        with pytest.raises(FileNotFoundError):
            found.read(keys[2])


def zip_of(path: Path, files: Files, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return path


def test_an_unchanged_archive_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statcache, "_YOUNG_NS", 0)
    for raw in (tar(tmp_path / "a.tar", pairs(5)), zip_of(tmp_path / "a.zip", [(f"c/{i}.png", picture(i)) for i in range(4)])):
        out = tmp_path / f"out-{raw.name}"
        run(source(raw), out)
        before = dataset(out)
        with monkeypatch.context() as patch:
            patch.setattr(ArchiveSource, "read", lambda *_: pytest.fail("read"))
            run(source(raw), out)
        assert dataset(out) == before


def test_out_may_lie_beside_an_archive_but_not_in_a_folder_of_them(tmp_path: Path) -> None:
    raw = tar(tmp_path / "raw/a.tar", pairs(2))
    with pytest.raises(OutputExistsError, match="inside RAW"):
        run(source(tmp_path / "raw"), tmp_path / "raw/out")
    run(source(raw), tmp_path / "raw/out")


def test_a_bad_image_in_an_archive_is_one_reject(tmp_path: Path) -> None:
    files = [*pairs(3), ("bad.png", BROKEN), ("bad.cls", b"1")]
    report = run(source(tar(tmp_path / "a.tar", files)), tmp_path / "out", max_rejects=1)
    assert report.rejects == 1
    assert keys(tmp_path / "out") == [f"{i:06}.png".encode() for i in range(3)]


@pytest.mark.parametrize("count", [0, 1])
def test_none_and_one(tmp_path: Path, count: int) -> None:
    for raw in (tar(tmp_path / "a.tar", pairs(count)), zip_of(tmp_path / "a.zip", [(f"c/{i}.png", picture(i)) for i in range(count)])):
        if count:
            run(source(raw), tmp_path / f"out-{raw.name}")
            assert len(Reader(tmp_path / f"out-{raw.name}")) == 1
        else:
            with pytest.raises(SourceError, match=rf"no images in .*a\.{raw.suffix[1:]}"):
                source(raw).scan()


# ---------------------------------------------------------------- hostile archives


def test_only_files_count_and_nothing_leads_out_of_an_archive(tmp_path: Path) -> None:
    path, data = tmp_path / "a.tar", picture(0)
    kinds = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for i, kind in enumerate(kinds):
            archive.addfile(entry(f"{i}.png", kind=kind, linkname="/etc/passwd"))
        for name in ("/abs.png", "../up.png", "a/../../up.png", "x/.."):
            archive.addfile(entry(name, len(data)), io.BytesIO(data))
        archive.addfile(entry("sparse.png", len(data), b"S"), io.BytesIO(data))
        archive.addfile(entry("./fine//a.png", len(data)), io.BytesIO(data))
        archive.addfile(entry("fine/a.cls", 1), io.BytesIO(b"0"))
        archive.addfile(entry("._hidden.png", len(data)), io.BytesIO(data))
    before = snapshot(tmp_path)
    scan = source(path).scan()
    assert list(scan.keys) == [b"fine/a.png"]
    assert scan.left_out == {"device": 2, "fifo": 1, "hidden": 1, "link": 2, "name that leads out of the archive": 4, "sparse": 1}
    assert source(path).read(scan.keys[0]) == data
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names(tmp_path: Path, format: int) -> None:
    names = ["a" * 60 + "/" + "b" * 90 + "/c.png", "花卉/ü.png", "x/d.png"]
    if format != tarfile.USTAR_FORMAT:
        names.append("k" * 300 + "/" + "n" * 200 + ".png")
    scan = source(tar(tmp_path / "a.tar", [(name, picture(i)) for i, name in enumerate(names)], format)).scan()
    assert sorted(scan.keys) == sorted(os.fsencode(name) for name in names)
    for key in scan.keys:
        assert source(tmp_path / "a.tar").read(key) == picture(names.index(os.fsdecode(key)))


def test_large_sizes_are_read_in_every_form(tmp_path: Path) -> None:
    """A member beyond 8 GiB: in base 256, and in pax records; the archive is a file with a hole."""
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path, size = tmp_path / "a.tar", 9 << 30
        with open(path, "wb") as file:
            file.write(entry("big.png", size).tobuf(format))
            file.seek(size, 1)
            file.write(entry("c/a.png", 3).tobuf(format) + b"abc".ljust(512, b"\0") + bytes(1024))
        scan = source(path).scan()
        assert list(scan.keys) == [b"c/a.png"]  # the other lies beside the class folder
        assert source(path).read(scan.keys[0]) == b"abc"
        flat = source(path, exclude=("c",)).scan()
        assert flat.keys == [b"big.png"]
        with pytest.raises(OSError, match="which are not read"):
            source(path).read(flat.keys[0])


def test_a_tar_that_is_cut_or_damaged_is_named_with_the_byte(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", pairs(3))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    last = members[-1]

    def refused(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(SourceError) as e:
            source(path).scan()
        assert "\n" not in str(e.value)
        assert str(path) in str(e.value)
        return str(e.value)

    assert f"byte {last.offset:,}: 000002.json has" in refused(whole[: last.offset_data + 3])
    assert f"byte {last.offset:,}: expected a header, and the archive ends" in refused(whole[: last.offset + 100])
    assert "it was cut short" in refused(whole[: last.offset_data + last.size])  # without the padding behind it
    middle = members[3].offset
    assert f"byte {middle:,}: expected the header of a member" in refused(whole[:middle] + b"\xff" * 512 + whole[middle + 512 :])
    assert "no tar archive" in refused(b"x" * 2048)
    assert "the archive is empty" in refused(b"")
    assert "expected a header" in refused(whole[:100])
    path.write_bytes(whole[: last.offset])
    scan = source(path).scan()
    assert any("without an end mark: it may have been cut there" in w for w in scan.warnings)
    path.write_bytes(whole + whole)
    scan = source(path).scan()
    assert len(scan.keys) == 3
    assert any("goes on behind its end mark" in w for w in scan.warnings)


@pytest.mark.parametrize(("magic", "tool"), [(b"\x1f\x8b\x08", "gunzip"), (b"\x28\xb5\x2f\xfd", "unzstd"), (b"BZh9", "bunzip2")])
def test_a_compressed_tar_is_refused_with_what_undoes_it(tmp_path: Path, magic: bytes, tool: str) -> None:
    for name in ("a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"):
        path = tmp_path / name
        path.write_bytes(magic + bytes(600))
        with pytest.raises(SourceError, match=rf"can only be read from its beginning, not in place: {tool} it first"):
            source(path).scan()


def test_two_members_of_one_name_are_named_with_both_places(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", [*pairs(2), ("000001.png", b"other")])
    with pytest.raises(SourceError, match=r"two members are called 000001\.png \(at byte [\d,]+ and byte [\d,]+\)"):
        source(path).scan()
    path = tar(tmp_path / "a.tar", [*pairs(2), ("000001.cls", b"1")])
    with pytest.raises(SourceError, match=r"sample 000001 has two \.cls members \(at byte [\d,]+ and byte [\d,]+\)"):
        source(path).scan()
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = zip_of(tmp_path / "a.zip", [("c/a.png", b"1"), ("c/a.png", b"2")])
    with pytest.raises(SourceError, match=r"two members are called c/a\.png \(at byte 0 and byte [\d,]+\)"):
        source(path).scan()


def test_names_that_differ_only_in_case_are_told(tmp_path: Path) -> None:
    for path in (tar(tmp_path / "a.tar", [("c/a.png", b"1"), ("c/A.PNG", b"2")]), zip_of(tmp_path / "a.zip", [("c/a.png", b"1"), ("C/a.png", b"2")])):
        scan = source(path).scan()
        assert len(scan.keys) == 2
        assert any("names differ only in case, as" in w for w in scan.warnings)


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    for data, why in ((b"{", "is no JSON"), (b"\xff", "expected text in UTF-8"), (b"[" * 10**5, "is no JSON")):
        path = tar(tmp_path / "a.tar", [("a.png", b"x"), ("a.json", data)])
        with pytest.raises(SourceError, match=rf"a\.tar, byte [\d,]+: .*{why}"):
            source(path).scan()


def test_damage_in_a_zip_is_found_before_pixels_are_made_of_it(tmp_path: Path) -> None:
    files = [("c/a.png", picture(0)), ("c/b.png", picture(1))]
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = zip_of(tmp_path / "a.zip", files, method)
        keys = source(path).scan().keys
        data = bytearray(path.read_bytes())
        data[100] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(OSError, match="CRC-32"):
            source(path).read(keys[0])
        assert source(path).read(keys[1]) == picture(1)
        with pytest.raises(SourceError, match=r"c/a\.png.*CRC-32"):
            run(source(path), tmp_path / f"out-{method}")


def test_members_of_a_zip_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", [("c/a.png", picture(0)), ("c/b.png", picture(1))], zipfile.ZIP_BZIP2)
    with pytest.raises(SourceError, match=r"2 images in it cannot be read: c/a\.png \(compressed by bzip2\), c/b\.png"):
        source(path).scan()
    path = zip_of(tmp_path / "a.zip", [("c/a.png", picture(0))])
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"1 image in it cannot be read: c/a\.png \(encrypted\)"):
        source(path).scan()


def test_a_zip_bomb_stops_at_the_size_that_it_is_said_to_have(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", [("c/a.png", bytes(100 << 20))])
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2") + 24
    data[at : at + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(data)
    keys = source(path).scan().keys
    tracemalloc.start()
    with pytest.raises(OSError, match="CRC-32"):
        source(path).read(keys[0])
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_zip_that_is_cut_or_is_none_is_refused(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "a.zip", [(f"c/{i}.png", picture(i)) for i in range(5)])
    whole = path.read_bytes()
    found = []
    for data in (whole[:-30], whole[: len(whole) // 2], whole[200:], b"", b"x" * 5000, whole[:10]):
        path.write_bytes(data)
        with pytest.raises(SourceError) as e:
            source(path).scan()
        assert str(path) in str(e.value)
        found.append(str(e.value))
    assert "was it cut short?" in found[1]
    assert "no zip archive" in found[4]
    path.write_bytes(b"#!/bin/sh\n" * 20 + whole)  # what extracts itself
    scan = source(path).scan()
    assert [source(path).read(key) for key in scan.keys] == [picture(i) for i in range(5)]


def test_zip64_and_names_of_old_and_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open(zipfile.ZipInfo("c/a.png"), "w", force_zip64=True) as member:
            member.write(picture(0))
        archive.writestr("c/ü.png", picture(1))
        dos = zipfile.ZipInfo("d\\b.png")
        dos.create_system = 0
        archive.writestr(dos, picture(2))
        archive.writestr("__MACOSX/c/._a.png", picture(3))
        link = zipfile.ZipInfo("c/link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("../up.png", picture(3))
    scan = source(path).scan()
    assert list(scan.keys) == [b"c/a.png", "c/ü.png".encode(), b"d/b.png"]
    assert [source(path).read(key) for key in scan.keys] == [picture(i) for i in range(3)]
    assert scan.left_out == {"hidden": 1, "link": 1, "name that leads out of the archive": 1}


def test_the_end_of_a_large_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)  # its end is then that of zip64
    path = zip_of(tmp_path / "a.zip", [(f"c/{i}.png", picture(i)) for i in range(3)])
    whole = path.read_bytes()
    assert b"PK\6\6" in whole
    for data in (whole, b"x" * 1000 + whole):
        path.write_bytes(data)
        scan = source(path).scan()
        assert [source(path).read(key) for key in scan.keys] == [picture(i) for i in range(3)]
    for mark, why in ((b"PK\6\6", "expected the zip64 record"), (b"PK\1\2", "expected an entry of its directory")):
        path.write_bytes(whole.replace(mark, b"PKxx", 1))
        with pytest.raises(SourceError, match=why):
            source(path).scan()
    at = whole.index(b"PK\6\6") + 32
    path.write_bytes(whole[:at] + (7).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(SourceError, match="its directory holds 3 members, and its end says 7"):
        source(path).scan()


def test_random_damage_is_an_error_or_the_same_pictures(tmp_path: Path) -> None:
    """No damage makes a traceback of another kind, or other content under a key without a word."""
    files = [(f"c/{i}.png", picture(i)) for i in range(4)]
    rng = np.random.default_rng(0)
    for path in (tar(tmp_path / "a.tar", [*files, *((f"c/{i}.cls", b"1") for i in range(4))]), zip_of(tmp_path / "a.zip", files)):
        whole = path.read_bytes()
        for _ in range(200):
            data = bytearray(whole)
            for at in rng.integers(0, len(whole), 4).tolist():
                data[at] = int(rng.integers(256))
            path.write_bytes(data if rng.random() < 0.8 else data[: int(rng.integers(len(data)))])
            try:
                found = source(path)
                for key in found.scan().keys:
                    read = found.read(key)
                    if path.suffix == ".zip":
                        assert read in [data for _, data in files]
            except OSError:
                continue


def test_many_tiny_members_take_little_memory(tmp_path: Path) -> None:
    count = 4_000
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        for i in range(count):
            for suffix, data in (("png", b"x"), ("cls", str(i % 10).encode())):
                file.write(entry(f"{i:08}.{suffix}", len(data)).tobuf(tarfile.USTAR_FORMAT) + data.ljust(512, b"\0"))
        file.write(bytes(1024))
    tracemalloc.start()
    scan = source(path).scan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(scan.keys) == count
    assert peak / count < 600


@pytest.mark.parametrize(
    ("member", "data", "why"),
    [
        ("a.cls", b"1\n2", "a .cls member of several lines"),
        ("a.cls", b"x" * 5000, r"a .cls member of 5,000 bytes"),
        ("a.cls", b"\xff", "expected text in UTF-8"),
        ("a.json", b'{"label": "\\ud800"}', "which is no UTF-8"),
        ("a.json", b'{"A": 1, "a": 2}', "would both be the field a"),
        ("a.json", json.dumps({f"k{i}": i for i in range(300)}).encode(), "300 fields beside the image, at most 255 are possible"),
    ],
)
def test_what_is_no_class_or_record_is_one_error(tmp_path: Path, member: str, data: bytes, why: str) -> None:
    with pytest.raises(MMCompileError, match=why) as e:
        source(tar(tmp_path / "a.tar", [("a.png", b"x"), (member, data)])).scan()
    assert "\n" not in str(e.value)


def test_values_that_no_field_can_hold_are_left_out_with_a_line(tmp_path: Path) -> None:
    record = b'{"big": 123456789012345678901234567890, "none": NaN, "x": 1, "1": 2}'
    scan = source(tar(tmp_path / "a.tar", [("a.png", b"x"), ("a.json", record), ("b.png", b"x"), ("b.json", b"{}")])).scan()
    assert [f.name for f in scan.fields] == ["x", "column_1"]
    assert any("big is left out: whole numbers over 64 bits" in w for w in scan.warnings)
    assert any("none is left out: no value in it" in w for w in scan.warnings)


def test_headers_that_lie_are_errors(tmp_path: Path) -> None:
    long = tar(tmp_path / "a.tar", [("k" * 200 + ".png", b"x")], tarfile.PAX_FORMAT).read_bytes()
    at = long.index(b" path=")
    negative = bytearray(entry("n.png", 3).tobuf(tarfile.USTAR_FORMAT))
    negative[124:136] = b"\xff" * 12
    negative[148:156] = b" " * 8
    negative[148:156] = b"%06o\0 " % sum(negative)
    huge = entry("p", 2 << 30, b"x").tobuf(tarfile.USTAR_FORMAT)
    for data, why in (
        (long[:at] + b" pa=h" + long[at + 6 :], "byte 512: pax records that are damaged"),
        (long[:512] + b"999999" + long[518:], "byte 512: pax records that are damaged"),
        (bytes(negative) + bytes(2048), "byte 0: a header with a size that no member has"),
        (huge + bytes(2048), "byte 0: a header with 2,147,483,648 bytes of names"),
    ):
        (tmp_path / "a.tar").write_bytes(data)
        with pytest.raises(SourceError, match=why):
            source(tmp_path / "a.tar").scan()
    (tmp_path / "a.tar").write_bytes(long.replace(b"path=kkk", b"path=../"))
    with pytest.raises(SourceError, match="1 name that leads out of the archive"):
        source(tmp_path / "a.tar").scan()


def test_no_object_is_held_for_a_sample_while_archives_are_listed(tmp_path: Path) -> None:
    for i in range(6):
        tar(tmp_path / f"raw/{i}.tar", tiny(500, 500 * i))

    def long_lists() -> int:
        return sum(isinstance(thing, list) and len(thing) >= 500 for thing in gc.get_objects())

    before = long_lists()
    held: list[int] = []
    scan = source(tmp_path / "raw").scan(lambda _: held.append(long_lists() - before))
    assert len(scan.keys) == 3000
    assert held[-1] <= 2  # those of the last archive


def tiny(count: int, start: int) -> list[tuple[str, bytes]]:
    return [f for i in range(start, start + count) for f in ((f"{i}.png", b"x"), (f"{i}.cls", b"%d" % (i % 7)), (f"{i}.json", b'{"a": %d}' % i))]
