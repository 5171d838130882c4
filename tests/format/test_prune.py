from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmcompile.compiler import seals as seals_module
from mmcompile.compiler.seals import Seal
from mmcompile.compiler.sources import STAT_DTYPE
from mmcompile.errors import BuildError, CorruptShardError, FormatError, GenerationError, NotADatasetError, OptionError
from mmcompile.format.index import load_index
from mmcompile.format.lock import Lock
from mmcompile.format.prune import prune
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from tests.format.builders import age, file_of, read_everything, republish, small, tree


@pytest.fixture
def three(root: Path) -> tuple[Path, list[str]]:
    """A dataset of three generations, oldest first; the current one is the last."""
    names = [load_index(root)[1], small(root, seed=1), small(root, seed=2)]
    for i, name in enumerate(names):
        age(root, name, 1000 * (3 - i))
    return root, names


def test_the_list_is_what_is_deleted_and_the_current_generation_stays_whole(three: tuple[Path, list[str]]) -> None:
    root, names = three
    before, content = tree(root), read_everything(root)
    plan = prune(root, delete=False)
    assert tree(root) == before
    assert not (root / ".build").exists()
    done = prune(root, delete=True)
    assert (plan.generations, plan.files, plan.kept, plan.others) == (done.generations, done.files, (names[2],), done.others)
    assert (plan.deleted, done.deleted) == (False, True)
    assert [g[0] for g in plan.generations] == names[:2]
    gone = {f"generations/{g[0]}.json" for g in done.generations} | {f"shards/{f[0]}" for f in done.files}
    after = tree(root)
    assert set(before) - set(after) == gone
    assert {k: v for k, v in after.items() if not k.startswith(".build")} == {k: v for k, v in before.items() if k not in gone}
    assert done.bytes == sum(len(before[name]) for name in gone)
    assert verify(root).ok
    assert verify(root).extra == ()
    assert str(read_everything(root)["rows"]) == str(content["rows"])
    json.dumps(done.to_json())
    assert prune(root, delete=True).bytes == 0


def test_keep_counts_the_current_generation_and_then_the_newest(three: tuple[Path, list[str]]) -> None:
    root, names = three
    assert prune(root, keep=2, delete=False).kept == (names[2], names[1])
    assert prune(root, keep=9, delete=False).kept == (names[2], names[1], names[0])
    report = prune(root, keep=2, delete=True)
    assert [g[0] for g in report.generations] == names[:1]
    Reader(root, generation=names[1]).column("image")
    with pytest.raises(GenerationError):
        Reader(root, generation=names[0])


def test_the_current_generation_stays_though_its_file_is_the_oldest(three: tuple[Path, list[str]]) -> None:
    root, names = three
    age(root, names[2], 1_000_000)
    assert prune(root, delete=True).kept == (names[2],)
    assert verify(root).ok


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(root: Path, keep: int) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        prune(root, keep=keep, delete=True)


def test_only_files_that_are_provably_ours_are_deleted(three: tuple[Path, list[str]]) -> None:
    root, _ = three
    shards = root / "shards"
    sample = file_of(root, "image").read_bytes()
    (shards / ("image-" + "0" * 32 + ".npy")).write_bytes(sample)
    (shards / "notes.txt").write_bytes(b"mine")
    (shards / "folder").mkdir()
    (shards / ("label-" + "1" * 32 + ".npy")).symlink_to("notes.txt")
    os.mkfifo(shards / ("label-" + "2" * 32 + ".npy"))
    (root / "generations" / "README").write_bytes(b"mine")
    report = prune(root, delete=True)
    kept = {
        "generations/README",
        "shards/folder",
        "shards/notes.txt",
        *(f"shards/{k}-{d * 32}.npy" for k, d in (("image", "0"), ("label", "1"), ("label", "2"))),
    }
    assert set(report.others) == kept
    assert all(os.path.lexists(root / name) for name in kept)


def test_files_of_seals_stay(three: tuple[Path, list[str]]) -> None:
    root, _ = three
    doomed = [name for name, _ in prune(root, delete=False).files]
    seals = root / ".build" / "seals"
    seals.mkdir(parents=True)
    sealed = [doomed[0], doomed[-1]]  # an image and a table or samples file
    write_seal(seals, sealed)
    report = prune(root, delete=True)
    assert [name for name, _ in report.files] == doomed[1:-1]
    assert all((root / "shards" / name).exists() for name in sealed)


def write_seal(seals: Path, files: list[str]) -> None:
    """A seal as a build writes it, of files of different kinds."""
    stat, hashes = np.zeros(1, STAT_DTYPE), np.zeros((1, 2), np.uint64)
    named = {name.split("-")[0]: name.split("-")[1].split(".")[0] for name in files}
    seal = Seal("a" * 32, "", "", {}, (), np.zeros(len(stat), []), stat, hashes, {}, named, rows=1)
    assert set(seal.names()) == set(files)
    seals_module.write_seal(seals, seal)


def test_a_seal_with_a_flipped_bit_stops_it(three: tuple[Path, list[str]]) -> None:
    root, _ = three
    seals = root / ".build" / "seals"
    seals.mkdir(parents=True)
    write_seal(seals, [name for name, _ in prune(root, delete=False).files][:1])
    (path,) = seals.iterdir()
    path.write_bytes(path.read_bytes().replace(b"image-", b"jmage-"))
    with pytest.raises(FormatError, match="nothing was deleted; remove this file"):
        prune(root, delete=True)


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"files":[]}', '{"seal":{"files":[]},"hash":"0"}', '{"seal":3,"hash":""}', "[" * 5000])
def test_a_seal_that_cannot_be_read_stops_it(three: tuple[Path, list[str]], data: str) -> None:
    root, _ = three
    seals = root / ".build" / "seals"
    seals.mkdir(parents=True)
    (seals / "a.json").write_text(data)
    before = tree(root / "shards")
    with pytest.raises(FormatError, match=r"a\.json"):
        prune(root, delete=True)
    assert tree(root / "shards") == before


def test_a_damaged_generation_or_kept_table_stops_it(three: tuple[Path, list[str]]) -> None:
    root, names = three
    before = tree(root / "shards")
    path = root / "generations" / f"{names[0]}.json"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptShardError, match=names[0]):
        prune(root, delete=True)
    path.write_bytes(data)
    table = file_of(root, "table")
    table.unlink()
    with pytest.raises(CorruptShardError, match=table.name):
        prune(root, delete=True)
    assert tree(root / "shards") == {k: v for k, v in before.items() if k != table.name}


def test_the_damaged_table_of_a_generation_that_goes_is_not_needed(three: tuple[Path, list[str]]) -> None:
    root, names = three
    (root / "shards" / f"table-{load_index(root, names[0])[0].table}.npy").unlink()
    prune(root, delete=True)
    assert verify(root).ok


def test_a_run_at_work_is_named(three: tuple[Path, list[str]]) -> None:
    root, _ = three
    (root / ".build").mkdir()
    code = "import sys; from mmcompile.format.lock import Lock\nwith Lock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code, root / ".build" / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        before = tree(root / "shards")
        with pytest.raises(BuildError, match=f"process {holder.pid} "):
            prune(root, delete=True)
        assert tree(root / "shards") == before
        prune(root, delete=False)
    finally:
        holder.communicate()


def test_a_lock_that_vanishes_stops_it(three: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = three
    monkeypatch.setattr(Lock, "still_held", lambda self: self._fd >= 0 and not (root / ".gone").exists())
    real = prune.__globals__["_plan"]

    def plan(*args: object, **keywords: object) -> object:
        if keywords.get("deleted"):
            (root / ".gone").touch()
        return real(*args, **keywords)

    monkeypatch.setitem(prune.__globals__, "_plan", plan)
    before = tree(root / "shards")
    with pytest.raises(BuildError, match="nothing was deleted"):
        prune(root, delete=True)
    assert tree(root / "shards") == before


def test_open_maps_outlive_a_prune_and_later_opens_say_what_to_do(three: tuple[Path, list[str]]) -> None:
    root, names = three
    reader = Reader(root, generation=names[0], engine="mmap")
    view = reader.view("image", 0)
    copy = view.copy()
    prune(root, delete=True)
    assert (view == copy).all()
    with pytest.raises(GenerationError, match="open the dataset anew"):
        reader.view("image", 1)


def test_no_dataset_gets_no_build_folder(tmp_path: Path) -> None:
    with pytest.raises(NotADatasetError):
        prune(tmp_path, delete=True)
    assert list(tmp_path.iterdir()) == []


def test_generations_with_the_same_files_share_them(root: Path) -> None:
    first = load_index(root)[1]
    second = republish(root, settings={"a": 1})
    age(root, first, 10)
    report = prune(root, delete=True)
    assert (report.kept, report.files) == ((second,), ())
    assert verify(root).ok
