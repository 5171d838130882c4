"""Several roots as one source, splits and class maps that are said, and what whole builds of these come to."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner

from mmcompile.cli import program
from mmcompile.compiler.sources import Scan
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.compiler.sources.classmap import read_classes
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.joined import JoinedSource
from mmcompile.errors import OptionError, OutputExistsError, SourceError
from mmcompile.format.index import load_index
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.compiler.builds import SMALL, dataset, inline, keys, picture, run, write
from tests.s3 import Bucket
from tests.support import make_dataset


def joined(*roots: Path | str, **options: object) -> JoinedSource:
    made = open_source([str(root) for root in roots], SourceOptions(**options))  # type: ignore[arg-type]
    assert isinstance(made, JoinedSource)
    return made


def tree(root: Path, *names: str) -> Path:
    return write(root, {name: name.encode() for name in names})


def found(scan: Scan) -> dict[str, list[tuple[str, int]]]:
    labels = np.full(len(scan.keys), -9) if scan.labels is None else scan.labels
    items = [(os.fsdecode(key), int(label)) for key, label in zip(scan.keys, labels, strict=True)]
    return {split.name: items[split.start : split.stop] for split in scan.ranges}


def test_roots_are_joined_class_by_class_with_their_numbers_in_front(tmp_path: Path) -> None:
    tree(tmp_path / "a", "cat/2.png", "cat/1.png", "dog/1.png")
    tree(tmp_path / "b", "dog/0.png", "ant/9.png", "cat/0.png", "stray.png")
    source = joined(tmp_path / "a", tmp_path / "b")
    scan = source.scan()
    assert found(scan) == {
        "all": [("1/ant/9.png", 0), ("0/cat/1.png", 1), ("0/cat/2.png", 1), ("1/cat/0.png", 1), ("0/dog/1.png", 2), ("1/dog/0.png", 2)]
    }
    assert scan.classes == ("ant", "cat", "dog")
    assert scan.left_out == {"directly in RAW beside class folders": 1}
    assert any(warning.startswith(f"left out, as directly in {tmp_path}/b, beside class folders: 1 image; ") for warning in scan.warnings)
    for key, size in zip(scan.keys, scan.stat["size"].tolist(), strict=True):
        data = source.read(key)
        assert key.endswith(b"/" + data)
        assert source.stat(key)[0] == size == len(data)
    assert pickle.loads(pickle.dumps(source)) == source
    assert joined(tmp_path / "b", tmp_path / "a").location() != source.location()


def test_ten_roots_and_more_stand_in_their_order(tmp_path: Path) -> None:
    roots = [tree(tmp_path / f"r{i}", "c/1.png") for i in range(12)]
    assert list(joined(*roots).scan().keys) == [b"%d/c/1.png" % i for i in range(12)]


def test_flat_roots_have_no_labels(tmp_path: Path) -> None:
    scan = joined(tree(tmp_path / "a", "1.png"), tree(tmp_path / "b", "0.png")).scan()
    assert found(scan) == {"all": [("0/1.png", -9), ("1/0.png", -9)]}
    said = f"samples have no labels, as each RAW holds images and no folders of classes: {tmp_path} as RAW makes a class of each"
    assert scan.warnings == (said,)
    assert joined(tmp_path / "a", tree(tmp_path / "deeper" / "b", "0.png")).scan().warnings == ()


def test_roots_may_hold_splits(tmp_path: Path) -> None:
    a = tree(tmp_path / "a", "train/x/1.png", "val/x/2.png")
    b = tree(tmp_path / "b", "train/y/3.png", "test/4.png")
    scan = joined(a, b).scan()
    assert found(scan) == {"train": [("0/train/x/1.png", 0), ("1/train/y/3.png", 1)], "val": [("0/val/x/2.png", 0)], "test": [("1/test/4.png", -1)]}
    c = tree(tmp_path / "c", "y/1.png")
    with pytest.raises(SourceError, match=rf"{a} holds splits \(train, val\) and {c} none: say with --split"):
        joined(a, c).scan()
    said = joined(a, c, split=(f"train={a}/train", f"val={a}/val/", f"extra={c}"))
    assert [*found(said.scan())] == ["train", "val", "extra"]


def test_roots_may_be_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tree(tmp_path / "train", "x/1.png"), tree(tmp_path / "val", "y/2.png", "x/1.png")
    plain = joined(a, b).scan()
    assert plain.splits == ()
    assert plain.warnings[-1] == f"what is in {a}, {b} is joined; to keep them apart: --split train={a} --split val={b}"
    monkeypatch.chdir(tmp_path)
    source = joined("train", "./val/", split=("val=val", f"train={a}/"))
    assert found(source.scan()) == {"train": [("0/x/1.png", 0)], "val": [("1/x/1.png", 0), ("1/y/2.png", 1)]}
    with pytest.raises(OptionError, match="expected one of the RAW given, or a folder below one"):
        joined(a, b, split=("train=x",))
    with pytest.raises(SourceError, match=f"no images in {b}/z: there is no such folder, or it is left out$"):
        joined(a, b, split=(f"train={a}", "val=val/z")).scan()


def test_patterns_are_on_whole_keys(tmp_path: Path) -> None:
    a, b = tree(tmp_path / "a", "x/1.png", "x/2.png"), tree(tmp_path / "b", "x/1.png", "y/1.png")
    scan = joined(a, b, exclude=("0/x/1.png", "1/y"), include=("*.png",)).scan()
    assert list(scan.keys) == [b"0/x/2.png", b"1/x/1.png"]
    assert scan.classes == ("x",)
    assert not any("matches nothing" in warning for warning in scan.warnings)


def test_what_would_be_taken_twice_or_is_not_there_is_refused(tmp_path: Path) -> None:
    a, b = tree(tmp_path / "a", "x/1.png"), tree(tmp_path / "b", "x/1.png")
    (tmp_path / "link").symlink_to(a / "x")
    for roots in ([a, a], [a, a / "x"], [b, tmp_path / "link", a]):
        with pytest.raises(SourceError, match="its images would be taken twice"):
            joined(*roots).scan()
    with pytest.raises(SourceError, match=r"no images in .*/empty$"):
        joined(a, tree(tmp_path / "empty", "notes.txt")).scan()
    with pytest.raises(SourceError, match="nope: No such file"):
        joined(a, tmp_path / "nope").scan()
    with pytest.raises(SourceError, match=r"nope: No such file"):
        joined(a, tmp_path / "nope").location()


def test_out_lies_in_none_of_the_roots(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {"x/1.png": picture(1)}), write(tmp_path / "b", {"x/1.png": picture(2)})
    for out in (a / "out", b / "x", b):
        with pytest.raises(OutputExistsError, match="inside RAW"):
            run(joined(a, b), out)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["1.png", "1.png", "a", "b", "x", "x"]


def test_progress_counts_over_all_roots(tmp_path: Path) -> None:
    seen: list[int] = []
    joined(tree(tmp_path / "a", "1.png", "2.png"), tree(tmp_path / "b", "3.png")).scan(seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 3


# ---------------------------------------------------------------- builds


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """train/, val/ with a class less, and a flat test/."""
    files = {
        f"{where}/{i}.png": picture(10 * n + i)
        for n, where in enumerate(("train/ant", "train/bee", "train/cow", "val/cow", "test"))
        for i in range(5)
    }
    return write(tmp_path / "raw", files)


def rows(out: Path) -> dict[bytes, tuple[bytes, int]]:
    """key -> (stored image, label)."""
    reader = Reader(out)
    images, labels = (reader.gather(name, np.arange(len(reader))) for name in ("image", "label"))
    return {key: (image.tobytes(), int(label)) for key, image, label in zip(keys(out), images, labels, strict=True)}


def test_a_dataset_with_splits_is_published_and_sound(raw: Path, tmp_path: Path) -> None:
    report = run(raw, tmp_path / "one", workers=2)
    assert report.splits == {"train": 15, "val": 5, "test": 5}
    assert report.classes == ("ant", "bee", "cow")
    index, _ = load_index(tmp_path / "one")
    assert [(s.name, s.start, s.stop) for s in index.splits] == [("train", 0, 15), ("val", 15, 20), ("test", 20, 25)]
    assert set(index.statistics) == {"train", "val", "test"}
    assert verify(tmp_path / "one").ok
    assert [label for _, label in rows(tmp_path / "one").values()] == [0] * 5 + [1] * 5 + [2] * 10 + [-1] * 5
    run(raw, tmp_path / "two", workers=1)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")


def test_images_that_change_their_split_are_not_decoded_again(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    run(raw, tmp_path / "out")
    os.rename(raw / "train/ant/0.png", raw / "test/moved.png")
    os.mkdir(raw / "val/ant")
    os.rename(raw / "train/ant/1.png", raw / "val/ant/1.png")
    os.rename(raw / "test", raw / "testing")
    report = run(raw, tmp_path / "out")
    assert report.decoded == 0
    assert report.splits == {"train": 13, "val": 6, "testing": 6}
    run(raw, tmp_path / "fresh")
    assert dataset(tmp_path / "out") == dataset(tmp_path / "fresh")
    assert run(raw, tmp_path / "out").kept == 25


def test_a_split_all_of_whose_images_are_rejected_is_empty(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    for path in (raw / "val/cow").iterdir():
        path.write_bytes(b"\x89PNG\r\n\x1a\n")
    report = run(raw, tmp_path / "out", max_rejects=5)
    assert report.splits == {"train": 15, "val": 0, "test": 5}
    assert verify(tmp_path / "out").ok


def test_joined_roots_have_the_rows_of_each(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    source = joined(raw / "train", raw / "val", split=(f"train={raw}/train", f"val={raw}/val"))
    run(source, tmp_path / "joined")
    run(raw, tmp_path / "plain")
    plain = {key: row for key, row in rows(tmp_path / "plain").items() if not key.startswith(b"test/")}
    assert rows(tmp_path / "joined") == {key.replace(b"train/", b"0/").replace(b"val/", b"1/"): row for key, row in plain.items()}
    assert load_index(tmp_path / "joined")[0].settings["source"]["splits"] == [["train", "0"], ["val", "1"]]
    again = run(source, tmp_path / "joined")
    assert (again.kept, again.decoded) == (20, 0)
    moved = joined(
        shutil.copytree(raw / "train", tmp_path / "t"),
        shutil.copytree(raw / "val", tmp_path / "v"),
        split=(f"train={tmp_path}/t", f"val={tmp_path}/v"),
    )
    run(moved, tmp_path / "moved")
    assert dataset(tmp_path / "joined") == dataset(tmp_path / "moved")


def test_statistics_of_what_is_trained_on_normalise(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    auto = type(SMALL)(crop=8, normalize="auto")
    os.rename(raw / "train", raw / "Training")
    run(raw, tmp_path / "out", auto)
    index, _ = load_index(tmp_path / "out")
    found = index.statistics["Training"]["image"]
    assert index.fields[0].normalize == (tuple(found["mean"]), tuple(found["std"]))
    assert found != index.statistics["val"]["image"]
    assert run(raw, tmp_path / "out", auto).kept == 25
    with pytest.raises(OptionError, match="the splits are val, other: call one of them train"):
        run(open_source([str(raw)], SourceOptions(split=("other=test", "val=val"))), tmp_path / "none", auto)
    assert not (tmp_path / "none" / "index.json").exists()
    run(open_source([str(raw)], SourceOptions(split=("only=test",))), tmp_path / "one", auto)
    assert load_index(tmp_path / "one")[0].fields[0].normalize is not None


# ---------------------------------------------------------------- class maps


def test_a_class_map_comes_from_a_dataset(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    run(raw, tmp_path / "train")
    source = open_source([str(raw / "val")], SourceOptions(classes_from=str(tmp_path / "train")))
    report = run(source, tmp_path / "val")
    assert report.classes == ("ant", "bee", "cow")
    assert {label for _, label in rows(tmp_path / "val").values()} == {2}
    changed = run(raw / "val", tmp_path / "val").changed
    assert [line.split(":")[0] for line in changed] == ["source.classes"]
    assert {label for _, label in rows(tmp_path / "val").values()} == {0}


def test_a_class_map_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "names"
    for text in ("b\na\nc d\n", "b\r\na\r\nc d\r\n", "\ufeffb\na\nc d", "b\na\nc d\n\n\n", '["b", "a", "c d"]', ' \n["b","a","c d"]\n'):
        file.write_bytes(text.encode())
        assert read_classes(str(file)) == ("b", "a", "c d")
    file.write_bytes(b"\xff\n")
    assert read_classes(str(file)) == ("\udcff",)
    file.write_text(json.dumps([{"bytes": "%FF"}, "x"]))
    assert read_classes(str(file)) == ("\udcff", "x")
    (tmp_path / "link").symlink_to(file)
    assert read_classes(str(tmp_path / "link")) == ("\udcff", "x")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"a\nb\na\n", r"entries 1 and 3 are both 'a'"),
        (b"a\n\nb\n", "entry 2: expected the name of a class"),
        (b"a/b\n", "entry 1: expected the name of a class, which is that of a folder, found 'a/b'"),
        (b"", "no name in it"),
        (b"[]", "no name in it"),
        (b'["a", 5]', "each a text"),
        (b'["a"', "no JSON"),
        (b'{"a": 0}', "expected a list of names"),
    ],
)
def test_files_that_are_no_class_map_are_refused(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "names").write_bytes(data)
    with pytest.raises(OptionError, match=why) as caught:
        read_classes(str(tmp_path / "names"))
    assert str(caught.value).startswith(f"--classes-from {tmp_path}/names: ")
    assert str(caught.value).isprintable()


def test_places_without_a_class_map_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such file or folder"):
        read_classes(str(tmp_path / "nope"))
    make_dataset(tmp_path / "flat", np.zeros((2, 3, 4, 4), np.uint8))
    with pytest.raises(OptionError, match="this dataset has no classes"):
        read_classes(str(tmp_path / "flat"))
    with pytest.raises(FileNotFoundError, match="not a dataset"):
        read_classes(str(tmp_path))
    assert isinstance(open_source([str(tmp_path)], SourceOptions()), FolderSource)


def test_a_list_of_paths_is_several_roots(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    run([raw / "train", str(raw / "val")], tmp_path / "listed")
    run(joined(raw / "train", raw / "val"), tmp_path / "joined")
    assert dataset(tmp_path / "listed") == dataset(tmp_path / "joined")
    run((raw,), tmp_path / "one")
    run(raw, tmp_path / "plain")
    assert dataset(tmp_path / "one") == dataset(tmp_path / "plain")


def test_joined_roots_are_built_in_parts(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    source = joined(raw / "train", raw / "val", split=(f"train={raw}/train", f"val={raw}/val"))
    run(source, tmp_path / "parts", options={"plan_only": True})
    other = joined(raw / "train", raw / "val", split=(f"a={raw}/train", f"b={raw}/val"))
    with pytest.raises(OptionError, match="a part is built as it was planned"):
        run(other, tmp_path / "parts", options={"part": "1/2"})
    for part in ("1/2", "2/2"):
        assert run(source, tmp_path / "parts", options={"part": part}).splits == {}
    assert run(source, tmp_path / "parts").decoded == 0
    run(source, tmp_path / "plain")
    assert dataset(tmp_path / "parts") == dataset(tmp_path / "plain")


def test_roots_on_a_store_are_joined_as_on_a_disk(raw: Path, s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    url = s3_bucket.fill({str(path.relative_to(raw)): path.read_bytes() for path in raw.rglob("*.png")} | {"val/cow/naked": picture(77)}, "raw")
    write(raw, {"val/cow/naked": picture(77)})
    far = joined(raw / "train", f"{url}/val", split=(f"train={raw}/train", f"val={url}/val/"), exclude=("1/cow/0.png", "0/bee"))
    near = joined(raw / "train", raw / "val", split=(f"train={raw}/train", f"val={raw}/val"), exclude=("1/cow/0.png", "0/bee"))
    assert found(far.scan()) == found(near.scan())
    assert far.scan().left_out == near.scan().left_out
    assert far.parallel == 16
    run(far, tmp_path / "far")
    run(near, tmp_path / "near")
    assert dataset(tmp_path / "far") == dataset(tmp_path / "near")
    assert run(far, tmp_path / "far").kept == 15
    splits = open_source([url], SourceOptions(split=("train=train", "val=val")))
    run(splits, tmp_path / "splits")
    run(open_source([str(raw)], SourceOptions(split=("val=val", "train=train"))), tmp_path / "same")
    assert dataset(tmp_path / "splits") == dataset(tmp_path / "same")


# ---------------------------------------------------------------- the command line


def cli(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(program, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_line_says_splits_and_what_repeats(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    copy = os.fsencode(raw / "val/cow") + b"/\xff.png"
    Path(os.fsdecode(copy)).write_bytes((raw / "train/ant/0.png").read_bytes())
    build = ("build", raw / "train", raw / "val", tmp_path / "out", "--split", f"train={raw}/train", "--split", f"val={raw}/val", "--crop", 8)
    code, said, _ = cli(*build)
    assert code == 0
    assert f"{tmp_path}/out: 21 samples in 3 classes" in said
    assert "splits     train 15, val 6\n" in said
    assert "leaked     samples that stand in an earlier split, too: val 1 (0/ant/0.png, " in said
    assert "two labels 2 samples under another label, too (" in said
    assert "duplicates 1 sample with the same bytes as one before\n" in said
    assert f"MMapShardDataset('{tmp_path}/out', split='train')" in said
    code, info, _ = cli("info", tmp_path / "out")
    assert [line for line in info.splitlines() if "leaked" in line] == [line for line in said.splitlines() if "leaked" in line]
    schema = jsonschema.Draft202012Validator(json.loads((Path(__file__).parents[2] / "schemas/report.schema.json").read_bytes()))
    for words in (build, ("info", tmp_path / "out")):
        code, printed, _ = cli(*words, "--json")
        document = json.loads(printed)
        schema.validate(document)
        assert document["repeats"] == {
            "duplicates": 1,
            "leaked": {"val": 1},
            "contradictory": 2,
            "examples": [{"keys": ["0/ant/0.png", {"bytes": "1/cow/%FF.png"}], "samples": 2, "leaked": True, "contradictory": True}],
        }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["raw", "out", "--split", "train"], "error: --split train: expected NAME=FOLDER, as in train=images/train"),
        (
            ["raw", "out", "--classes-from", "nope"],
            "error: --classes-from nope: no such file or folder; expected a dataset, or a file with one name a line",
        ),
        (["raw/train", "raw/train/ant", "out"], "its images would be taken twice; give one of them"),
        (["raw/train", "raw/val", "raw/test"], "raw/test: holds what mmcompile did not write"),
        (
            ["raw", "out", "--source", "folder", "--columns", "x"],
            "error: --columns does not go with --source folder: leave it out, or give another --source (",
        ),
    ],
)
def test_wrong_words_are_one_line_and_write_nothing(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, error = cli("build", *words)
    assert code in (1, 2)
    assert printed == ""
    lines = [line for line in error.splitlines() if line != "scan"]
    assert said in lines[0]
    assert len(lines) == 1
    assert sorted(os.listdir(tmp_path)) == ["raw"]
