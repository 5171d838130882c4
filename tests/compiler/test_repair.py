"""A repaired dataset has its old bytes, whatever was damaged; what cannot be repaired is named and stays as it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.repair import RepairReport, aside, repair
from mmcompile.compiler.repair import state as repair_state
from mmcompile.compiler.repair.relic import Placing
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.errors import BuildError, FormatError, NotADatasetError, OptionError, OutputExistsError, SourceError
from mmcompile.format.describe import describe
from mmcompile.format.index import load_index
from mmcompile.format.lock import Lock
from mmcompile.format.reader import Reader
from mmcompile.format.samples import pair_hash
from mmcompile.format.verify import verify
from tests.support import make_dataset

ROW = 3 * 8 * 8
#: Pillow's resampler keeps torch, which takes seconds to import, out of the workers.
SETTINGS = Preprocess(resize=10, crop=8, resampler="pillow")

Files = dict[str, bytes]


def picture(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (12 + seed % 5, 14, 3), np.uint8)).save(path, quality=90)


def make_raw(raw: Path) -> None:
    for c, name in enumerate(("a b", "a", "c")):
        for i in range(9):
            picture(raw / name / ("sub/" * (i > 5)) / f"{i}.{'png' if i % 2 else 'jpg'}", 100 * c + i)
    (raw / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (raw / "c" / "broken.jpg").write_bytes(b"\xff\xd8\xffnothing")


def make(raw: Path, out: Path, preprocess: Preprocess = SETTINGS) -> None:
    build(raw, out, preprocess=preprocess, options=BuildOptions(workers=1, shard_bytes=6 * ROW), max_rejects=9)


def state(root: Path) -> Files:
    """Every file that is not of .build."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and ".build" not in path.parts[-3:]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """raw/, one/ with one generation; raw2/, two/ with two that share shards (raw2 is raw after changes)."""
    root = tmp_path_factory.mktemp("world")
    make_raw(root / "raw")
    make(root / "raw", root / "one")
    shutil.copytree(root / "one", root / "two")
    shutil.copytree(root / "raw", root / "raw2")
    picture(root / "raw2/a/5a.png", 900)
    make(root / "raw2", root / "two")
    make(root / "raw", root / "hwc", Preprocess(crop=6, dtype="float32", normalize="imagenet", layout="hwc", mode="rgb"))
    return root


@pytest.fixture
def copy(world: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make_copy(name: str) -> Path:
        shutil.copytree(world / name, tmp_path / name, symlinks=True)
        return tmp_path / name

    return make_copy


@pytest.fixture
def one(copy: Callable[[str], Path]) -> Path:
    return copy("one")


def files(root: Path, kind: str) -> list[Path]:
    return sorted((root / "shards").glob(f"{kind}-*"))


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x5A
    os.chmod(path, 0o644)
    path.write_bytes(data)


def mended(root: Path, raw: Path, before: Files, workers: int = 1) -> RepairReport:
    """Repair, and see that nothing is left of the damage."""
    assert state(root) != before
    raw_before = state(raw)
    report = repair(root, raw, workers=workers)
    assert report.missing == ()
    assert report.ok
    assert state(root) == before
    assert state(raw) == raw_before
    assert verify(root).ok
    assert not list((root / ".build" / "tmp").iterdir())
    return report


KINDS = ("image", "label", "samples", "keys", "table", "rejects")


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_in_each_kind_of_file_is_undone(one: Path, world: Path, kind: str) -> None:
    before = state(one)
    flip(files(one, kind)[0])
    report = mended(one, world / "raw", before)
    assert report.repaired == (f"shards/{files(one, kind)[0].name}",)
    assert [p.what for p in report.problems if p.path.endswith(files(one, kind)[0].name)] == [kind]


def test_only_bad_rows_are_decoded(one: Path, world: Path) -> None:
    before = state(one)
    path = files(one, "image")[0]
    flip(path, 4096 + ROW + 7)
    flip(path, 4096 + 2 * ROW + 7)
    assert mended(one, world / "raw", before).decoded == 2


def test_damage_before_the_rows_needs_no_source(one: Path, world: Path, tmp_path: Path) -> None:
    before = state(one)
    (tmp_path / "nothing").mkdir()
    flip(files(one, "image")[0], 20)
    assert mended(one, tmp_path / "nothing", before).decoded == 0


def test_wrong_lengths_and_absence_are_undone_in_one_run(one: Path, world: Path) -> None:
    before = state(one)
    images = files(one, "image")
    os.truncate(images[0], 4096 + ROW + 3)
    with open(images[1], "ab") as file:
        file.write(b"more")
    images[2].unlink()
    images[3].write_bytes(b"")
    for kind in ("label", "samples", "keys"):
        os.truncate(files(one, kind)[0], 4099)
        files(one, kind)[1].unlink()
    files(one, "rejects")[0].unlink()
    report = mended(one, world / "raw", before, workers=2)
    assert len(report.repaired) == 11


def test_swapped_files_are_put_back_without_a_source(one: Path, tmp_path: Path) -> None:
    before = state(one)
    (tmp_path / "nothing").mkdir()
    for kind in ("image", "keys"):
        first, second = files(one, kind)[:2]
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
    assert mended(one, tmp_path / "nothing", before).decoded == 0


def test_a_whole_shard_is_made_again(one: Path, world: Path) -> None:
    before = state(one)
    reader = Reader(one)
    for kind in ("image", "label", "samples", "keys"):
        reader.path(kind, 2).unlink()
    mended(one, world / "raw", before)


def test_a_lost_table_is_found_again_without_a_source(one: Path, tmp_path: Path) -> None:
    before = state(one)
    (tmp_path / "nothing").mkdir()
    files(one, "table")[0].unlink()
    assert mended(one, tmp_path / "nothing", before).decoded == 0


def test_the_table_and_a_whole_shard_are_made_again(one: Path, world: Path) -> None:
    before = state(one)
    reader = Reader(one)
    for kind in ("image", "label", "samples", "keys"):
        reader.path(kind, 1).unlink()
    flip(reader.path("samples", 3))
    files(one, "table")[0].unlink()
    files(one, "rejects")[0].unlink()
    mended(one, world / "raw", before)


def test_nothing_but_the_index_is_left(one: Path, world: Path) -> None:
    before = state(one)
    shutil.rmtree(one / "shards")
    mended(one, world / "raw", before)


@pytest.mark.parametrize("damage", ["flip", "garbage", "missing"])
def test_the_index_comes_from_its_generation_and_back(copy: Callable[[str], Path], world: Path, damage: str) -> None:
    for name in ("index", "generation"):
        root = copy("two")
        before = state(root)
        current = load_index(root)[1]
        path = root / "index.json" if name == "index" else root / "generations" / f"{current}.json"
        times = {p.name: p.stat().st_mtime_ns for p in (root / "generations").iterdir()}
        if damage == "flip":
            at = path.read_bytes().index(b'"samples":') + 11
            flip(path, at)
        elif damage == "garbage":
            path.write_bytes(b"\0" * 100)
            os.utime(path, ns=(times.get(path.name, 0),) * 2)
        else:
            path.unlink()
        mended(root, world / "raw2", before)
        ages = sorted((root / "generations").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        assert ages[-1].stem == current
        shutil.rmtree(root)


def test_a_lost_generation_that_is_not_current_is_named(copy: Callable[[str], Path], world: Path) -> None:
    root = copy("two")
    old = next(p for p in (root / "generations").iterdir() if p.stem != load_index(root)[1])
    flip(old)
    before = state(root)
    report = repair(root, world / "raw2", workers=1)
    assert [m.path for m in report.missing] == [f"generations/{old.name}"]
    assert not report.ok
    assert state(root) == before


def test_a_damaged_index_is_never_taken_for_a_generation(copy: Callable[[str], Path], world: Path) -> None:
    """With its generation file gone bad too, the newest generation that is whole takes its place, and the other is named."""
    root = copy("two")
    current = load_index(root)[1]
    [old] = {p.stem for p in (root / "generations").iterdir()} - {current}
    data = (root / "index.json").read_bytes()
    (root / "index.json").write_bytes(data.replace(b'"layout":"chw"', b'"layout":"hwc"').replace(b'"shape":[3,8,8]', b'"shape":[8,8,3]'))
    flip(root / "generations" / f"{current}.json")
    report = repair(root, world / "raw2", workers=1)
    assert report.repaired == ("index.json",)
    assert [m.path for m in report.missing] == [f"generations/{current}.json"]
    assert load_index(root)[1] == old
    assert len(list((root / "generations").iterdir())) == 2


def test_what_stands_in_the_place_of_a_file_is_not_deleted(one: Path, world: Path, tmp_path: Path) -> None:
    linked, blocked = files(one, "image")[:2]
    before = state(one)
    shutil.move(linked, tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    blocked.unlink()
    (blocked / "precious").mkdir(parents=True)
    report = repair(one, world / "raw", workers=1)
    assert report.repaired == (f"shards/{linked.name}",)
    assert not linked.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == before[f"shards/{linked.name}"]
    assert "move it away" in report.missing[0].reason
    assert (blocked / "precious").is_dir()


def test_two_generations_that_share_shards_are_repaired_together(copy: Callable[[str], Path], world: Path) -> None:
    root = copy("two")
    before = state(root)
    assert len(files(root, "table")) == 2
    assert len(files(root, "samples")) < sum(np.load(path).size for path in files(root, "table"))
    for kind in ("image", "samples", "keys", "label"):
        for path in files(root, kind)[::2]:
            flip(path)
    mended(root, world / "raw2", before, workers=2)


def test_the_tables_of_two_generations_are_found_again(copy: Callable[[str], Path], world: Path) -> None:
    root = copy("two")
    before = state(root)
    for path in files(root, "table"):
        flip(path)
    mended(root, world / "raw2", before)


def test_rows_of_another_shard_stand_in_for_a_lost_source(copy: Callable[[str], Path], world: Path, tmp_path: Path) -> None:
    root = copy("two")
    before = state(root)
    (tmp_path / "nothing").mkdir()
    new, old = (Reader(root, generation=p.stem) for p in sorted((root / "generations").iterdir(), key=lambda p: -p.stat().st_mtime_ns))
    alone = {old.path("image", s) for s in range(len(old.table))} - {new.path("image", s) for s in range(len(new.table))}
    for path in alone:
        path.unlink()
    assert alone
    assert mended(root, tmp_path / "nothing", before).decoded == 0


def test_sources_are_found_wherever_they_lie(one: Path, world: Path, tmp_path: Path) -> None:
    before = state(one)
    raw = tmp_path / "moved"
    shutil.copytree(world / "raw", raw)
    for i, path in enumerate(sorted(raw.rglob("*.*"))):
        path.rename(raw / (f".hidden-{i}" if i % 2 else f"{i}.dat"))
    for path in files(one, "image"):
        flip(path)
    mended(one, raw, before)


def test_keys_are_found_in_a_raw_that_grew(one: Path, world: Path, tmp_path: Path) -> None:
    before = state(one)
    raw = tmp_path / "grown"
    shutil.copytree(world / "raw", raw)
    for i in range(3):
        picture(raw / "a" / f"{i}x.png", 700 + i)
    for path in files(one, "keys"):
        path.unlink()
    for path in files(one, "label"):
        path.unlink()
    mended(one, raw, before)


def test_samples_are_made_again_from_a_raw_that_grew(one: Path, world: Path, tmp_path: Path) -> None:
    before = state(one)
    raw = tmp_path / "grown"
    shutil.copytree(world / "raw", raw)
    picture(raw / "a" / "2x.png", 700)
    for path in files(one, "samples"):
        flip(path)
    mended(one, raw, before)


@pytest.mark.parametrize("change", ["missing", "changed"])
@pytest.mark.parametrize("kind", ["image", "samples"])
def test_a_source_that_is_not_there_is_named_and_nothing_changes(one: Path, world: Path, tmp_path: Path, kind: str, change: str) -> None:
    raw = tmp_path / "less"
    shutil.copytree(world / "raw", raw)
    reader = Reader(one)
    key = os.fsdecode(reader.keys(1)[2])
    digest = pair_hash(reader.samples(1)["source_hash"][2])
    path = reader.path(kind, 1)
    flip(path, 4096 + 2 * ROW + 3 if kind == "image" else 4100)
    if change == "missing":
        (raw / key).unlink()
    else:
        picture(raw / key, 999)
    before = state(one)
    report = repair(one, raw, workers=1)
    assert state(one) == before
    [missing] = report.missing
    assert missing.path == f"shards/{path.name}"
    assert missing.sources == ((key, digest if kind == "image" else None),)
    assert repr(key) in missing.reason
    assert report.repaired == ()
    json.dumps(report.to_json())


def test_what_can_be_repaired_is_although_another_file_cannot(one: Path, world: Path, tmp_path: Path) -> None:
    before = state(one)
    raw = tmp_path / "less"
    shutil.copytree(world / "raw", raw)
    reader = Reader(one)
    lost, other = reader.path("image", 0), reader.path("image", 1)
    (raw / os.fsdecode(reader.keys(0)[0])).unlink()
    flip(lost, 4096)
    flip(other, 4096)
    report = repair(one, raw, workers=1)
    assert report.repaired == (f"shards/{other.name}",)
    assert [m.path for m in report.missing] == [f"shards/{lost.name}"]
    after = state(one)
    assert {name for name in before if before[name] != after[name]} == {f"shards/{lost.name}"}


def test_another_library_version_is_named(one: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = aside.versions_of(SETTINGS)
    monkeypatch.setattr(aside, "versions_of", lambda preprocess: {**now, "pillow": "9.9"})
    key = os.fsdecode(Reader(one).keys(0)[0])
    flip(Reader(one).path("samples", 0), 4100)
    before = state(one)
    raw = one.parent / "other"
    shutil.copytree(world / "raw", raw)
    picture(raw / key, 999)
    report = repair(one, raw, workers=1)
    assert state(one) == before
    [missing] = report.missing
    assert missing.sources == ((key, None),)
    assert missing.versions == (("pillow", now["pillow"], "9.9"),)


def test_float_rows_in_another_layout_are_repaired(copy: Callable[[str], Path], world: Path) -> None:
    root = copy("hwc")
    before = state(root)
    for kind in KINDS:
        flip(files(root, kind)[-1])
    mended(root, world / "raw", before, workers=2)


def test_a_flat_folder_is_repaired(tmp_path: Path) -> None:
    raw, root = tmp_path / "raw", tmp_path / "out"
    for i in range(14):
        picture(raw / f"{i}.png", i)
    make(raw, root)
    before = state(root)
    for kind in ("image", "samples", "keys", "table"):
        flip(files(root, kind)[0])
    mended(root, raw, before)


def test_many_classes_and_a_sound_dataset(tmp_path: Path) -> None:
    raw, root = tmp_path / "raw", tmp_path / "out"
    for i in range(3):
        picture(raw / f"{i:03}" / "0.png", i)
    for i in range(300):
        (raw / f"{i:03}").mkdir(exist_ok=True)
    make(raw, root)
    before = state(root)
    assert repair(root, raw, workers=1).problems == ()
    for kind in ("classes", "table", "label"):
        flip(files(root, kind)[0])
    mended(root, raw, before)


def test_a_dataset_that_was_not_built_from_a_folder_is_left_alone(tmp_path: Path) -> None:
    root, raw = tmp_path / "out", tmp_path / "raw"
    raw.mkdir()
    make_dataset(root, np.arange(4 * ROW, dtype=np.uint8).reshape(4, 3, 8, 8), [0, 1, 0, 1])
    flip(files(root, "image")[0])
    before = state(root)
    report = repair(root, raw, workers=1)
    assert state(root) == before
    assert "cannot be repeated" in report.missing[0].reason


def test_refusals(one: Path, world: Path, tmp_path: Path) -> None:
    with pytest.raises(NotADatasetError):
        repair(tmp_path, world / "raw")
    with pytest.raises(SourceError):
        repair(one, tmp_path / "absent")
    with pytest.raises(OutputExistsError, match="inside RAW"):
        repair(one, tmp_path)
    with pytest.raises(OptionError, match="workers"):
        repair(one, world / "raw", workers=0)
    with Lock(one / ".build" / "lock"), pytest.raises(BuildError, match="another run"):
        repair(one, world / "raw")


def test_nothing_is_written_through_a_linked_folder(one: Path, world: Path, tmp_path: Path) -> None:
    shutil.move(one / "shards", tmp_path / "elsewhere")
    (one / "shards").symlink_to(tmp_path / "elsewhere")
    flip(sorted((tmp_path / "elsewhere").glob("image-*"))[0])
    before = state(tmp_path / "elsewhere")
    assert not repair(one, world / "raw", workers=1).ok
    assert state(tmp_path / "elsewhere") == before


def test_a_full_disk_is_seen_before_the_start(one: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_state, "free_bytes", lambda root: 100)
    flip(files(one, "image")[0])
    before = state(one)
    with pytest.raises(BuildError, match="100 are free"):
        repair(one, world / "raw", workers=1)
    assert state(one) == before


def test_progress_is_told(one: Path, world: Path) -> None:
    flip(files(one, "image")[0])
    seen: list[Progress] = []
    repair(one, world / "raw", workers=1, progress=seen.append)
    assert {"verify", "repair"} <= {p.stage for p in seen}
    assert any(p.message.startswith("repaired shards/image-") for p in seen)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """raw/ with splits, one of them flat; out/ of it, named/ with two splits called otherwise and a class map, and joined/ of two roots."""
    root = tmp_path_factory.mktemp("parted")
    for c, name in enumerate(("train/b", "train/a", "val/b", "test")):
        for i in range(7):
            picture(root / "raw" / name / f"{i}.png", 100 * c + i)
    (root / "raw/train/b/broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (root / "classes.txt").write_text("z\nb\na\n")
    raw, options = str(root / "raw"), BuildOptions(workers=1, shard_bytes=4 * ROW)
    named = SourceOptions(split=("fit=train", "check=val"), classes_from=str(root / "classes.txt"))
    for out, source in {
        "out": open_source([raw], SourceOptions()),
        "named": open_source([raw], named),
        "joined": open_source([f"{raw}/train", f"{raw}/val"], SourceOptions()),
    }.items():
        build(source, root / out, preprocess=SETTINGS, options=options, max_rejects=1)
    return root


@pytest.mark.parametrize("out", ["out", "named"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_with_splits_is_repaired(parted: Path, tmp_path: Path, out: str, kind: str) -> None:
    shutil.copytree(parted / out, tmp_path / out)
    before = state(tmp_path / out)
    for path in files(tmp_path / out, kind):
        flip(path)
    mended(tmp_path / out, parted / "raw", before)


@pytest.mark.parametrize("out", ["out", "named"])
def test_a_lost_table_of_splits_is_found_again_without_decoding(parted: Path, tmp_path: Path, out: str) -> None:
    shutil.copytree(parted / out, tmp_path / out)
    before = state(tmp_path / out)
    files(tmp_path / out, "table")[0].unlink()
    assert mended(tmp_path / out, parted / "raw", before).decoded == 0


def test_a_dataset_of_several_folders_is_left_alone_and_says_so(parted: Path, tmp_path: Path) -> None:
    shutil.copytree(parted / "joined", tmp_path / "joined")
    flip(files(tmp_path / "joined", "image")[0])
    before = state(tmp_path / "joined")
    with pytest.raises(OptionError, match="it was not built from one folder of images, so it is not repaired file by file: delete the files that"):
        repair(tmp_path / "joined", parted / "raw", workers=1)
    assert state(tmp_path / "joined") == before


@pytest.mark.parametrize("how", [Path.unlink, flip])
@pytest.mark.parametrize("kind", ["rejects", "table"])
def test_what_cannot_be_read_names_the_command_that_mends_it(world: Path, one: Path, kind: str, how: Callable[[Path], object]) -> None:
    before = describe(one)
    how(files(one, kind)[0])
    calls = [lambda: describe(one), lambda: make(world / "raw", one)]
    for call in calls if kind == "table" else calls[:1]:  # a build makes rejects anew
        with pytest.raises(FormatError, match=rf"{kind}-.*; run `mmcompile verify( {one})?`, which says how to mend it"):
            call()
    assert repair(one, world / "raw", workers=1).repaired == (f"shards/{files(one, kind)[0].name}",)
    after = describe(one)
    assert {**after, "bytes": None} == {**before, "bytes": None}
    make(world / "raw", one)


@pytest.mark.parametrize(
    ("source", "key", "label", "position"),
    [
        ({"kind": "folder"}, b"train/b/x/1.png", 1, (0, 1, 0, "train/b/x", "1.png")),
        ({"kind": "folder"}, b"val/1.png", -1, (1, 2, 0, "val", "1.png")),
        ({"kind": "folder"}, b"train/z/1.png", None, None),
        ({"kind": "folder"}, b"other/b/1.png", None, None),
        ({"kind": "folder", "roots": 12}, b"11/val/a/1.png", 0, (1, 0, 11, "11/val/a", "1.png")),
        ({"kind": "folder", "roots": 10**15}, b"1/val/a/1.png", 0, (1, 0, 1, "1/val/a", "1.png")),
        ({"kind": "folder", "splits": [["train", "x/y"], ["val", "z"]]}, b"x/y/b/1.png", 1, (0, 1, 0, "x/y/b", "1.png")),
        ({"kind": "folder", "splits": [["train", ""]]}, b"a/1.png", 0, (0, 0, 0, "a", "1.png")),
        ({"kind": "folder", "roots": 2, "splits": [["train", "1"], ["val", "0/z"]]}, b"0/z/a/1.png", 0, (1, 0, 0, "0/z/a", "1.png")),
        ({"kind": "folder", "roots": 0, "splits": [["train", "x"]]}, b"x/a/1.png", None, None),
        ({"kind": "folder", "splits": 5}, b"train/a/1.png", None, None),
        ({"kind": "folder", "roots": "x"}, b"train/a/1.png", None, None),
        ({"kind": "tar"}, b"train/a/1.png", None, None),
        (None, b"train/a/1.png", None, None),
    ],
)
def test_a_key_is_placed_as_the_settings_say(tmp_path: Path, source: object, key: bytes, label: int | None, position: object) -> None:
    images, labels = np.zeros((3, 3, 2, 2), np.uint8), np.array([0, 1, 1])
    make_dataset(tmp_path, images, labels, classes=("a", "b"), splits={"train": 2, "val": 1}, settings={"source": source})
    placing = Placing(load_index(tmp_path)[0], ("a", "b"))
    assert placing.label(key) == label
    assert placing.position(key) == position


def test_rows_of_arrays_are_mended_by_the_same_build_once_the_bad_files_are_gone(tmp_path: Path) -> None:
    array, out = np.random.default_rng(0).normal(size=(3000, 8)), tmp_path / "out"
    np.save(tmp_path / "x.npy", array)

    def made() -> None:
        build(open_source([str(tmp_path / "x.npy")], SourceOptions()), out, options=BuildOptions(workers=1, shard_bytes=64_000))

    made()
    before = {path.name: path.read_bytes() for path in (out / "shards").iterdir()}
    bad = sorted((out / "shards").glob("x-*"))[1]
    bad.write_bytes(bad.read_bytes()[:-1] + b"\x07")
    sound = sorted((out / "shards").glob("hashes-*"))[0]
    sound.unlink()
    report = verify(out)
    assert {problem.path for problem in report.problems} == {f"shards/{bad.name}", f"shards/{sound.name}"}
    assert not report.repair
    with pytest.raises(OptionError, match="delete the files that `mmcompile verify` names"):
        repair(out, tmp_path / "x.npy")
    bad.unlink()
    made()
    assert {path.name: path.read_bytes() for path in (out / "shards").iterdir()} == before
    assert verify(out).ok
