"""The folder source against torchvision's ImageFolder, a dumb oracle, and trees that are odd in every way."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.compiler.formats import TORCHVISION_EXTENSIONS
from mmcompile.compiler.sources import STAT_DTYPE, Scan
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.splits import Layout, parse_splits, rank
from mmcompile.errors import OptionError, SourceError

PNG = b"\x89PNG\r\n\x1a\n" + bytes(24)


def make(root: Path, *names: str | bytes) -> Path:
    """Files (or, with a `/` at the end, folders) below `root`; the content of a file is its name."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(path if path.endswith(b"/") else os.path.dirname(path), exist_ok=True)
        if not path.endswith(b"/"):
            with open(path, "wb") as file:
                file.write(os.fsencode(name))
    return root


def source(root: Path | str, **options: object) -> FolderSource:
    return FolderSource(str(root), **{"extensions": TORCHVISION_EXTENSIONS, **options})  # type: ignore[arg-type]


def listing(scan: Scan) -> list[tuple[bytes, int | None]]:
    return [
        (key, None if scan.labels is None else int(label))
        for key, label in zip(scan.keys, scan.labels if scan.labels is not None else scan.keys, strict=True)
    ]


@contextlib.contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder, and file permissions that count even where the tests run as root."""
    with tempfile.TemporaryDirectory() as folder:
        was_root = os.geteuid() == 0
        if was_root:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if was_root:
                os.seteuid(0)


def visible(name: str) -> bool:
    return not (name.startswith(".") or name == "__MACOSX")


def image(path: str, *, hidden: bool) -> bool:
    """Whether a file counts, by its name; a dangling link does, a folder does not."""
    return (hidden or visible(os.path.basename(path))) and path.lower().endswith(tuple(TORCHVISION_EXTENSIONS)) and not os.path.isdir(path)


def oracle(root: str, *, hidden: bool = False) -> tuple[list[str], list[tuple[bytes, int]]]:
    """ImageFolder's listing, written as plainly as it goes: classes, and (key, label) of each image."""

    classes = sorted(name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name)) and (hidden or visible(name)))
    items = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            inside = os.path.relpath(folder, root)
            if hidden or all(visible(part) for part in inside.split("/")):
                images = [file for file in sorted(files) if image(os.path.join(folder, file), hidden=hidden)]
                items += [(os.fsencode(f"{inside}/{file}"), label) for file in images]
    return classes, items


def test_class_folders_stand_in_text_order_with_their_numbers(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "dog/b.jpg", "dog/a.PNG", "cat/z.jpg", "cat 2/q.jpg", "cat/sub/a.jpg", "cat/sub 1/a.jpg")).scan()
    assert scan.classes == ("cat", "cat 2", "dog")
    assert listing(scan) == [
        (b"cat/z.jpg", 0),
        (b"cat/sub/a.jpg", 0),
        (b"cat/sub 1/a.jpg", 0),
        (b"cat 2/q.jpg", 1),
        (b"dog/a.PNG", 2),
        (b"dog/b.jpg", 2),
    ]
    assert scan.labels is not None
    assert scan.labels.dtype == np.int64
    assert scan.warnings == ()
    assert scan.left_out == {}


def test_folders_are_sorted_by_their_whole_path(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "c/a/x/1.png", "c/a b/1.png", "c/a/1.png", "c/a-b/1.png")).scan()
    assert scan.keys == [b"c/a/1.png", b"c/a b/1.png", b"c/a-b/1.png", b"c/a/x/1.png"]


def test_stat_columns_are_those_of_the_files(tmp_path: Path) -> None:
    src = source(make(tmp_path, "a/1.png", "a/22.png"))
    scan = src.scan()
    assert scan.stat.dtype == STAT_DTYPE
    for key, row in zip(scan.keys, scan.stat, strict=True):
        found = os.stat(tmp_path / os.fsdecode(key))
        assert tuple(row) == src.stat(key) == (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "b.jpg", "a.jpg", "notes/readme.txt", "empty/")).scan()
    assert (scan.keys, scan.labels, scan.classes) == ([b"a.jpg", b"b.jpg"], None, None)
    assert scan.left_out == {"extension .txt": 1}


def test_images_beside_class_folders_are_left_out_and_counted(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "cat/1.jpg", "stray.jpg", "stray2.jpg", "README.md")).scan()
    assert scan.keys == [b"cat/1.jpg"]
    assert scan.left_out == {"directly in RAW beside class folders": 2, "extension .md": 1}


def test_empty_class_keeps_its_number_and_warns(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "ant/1.jpg", "bee/", "cow/notes.txt", "dog/1.jpg")).scan()
    assert scan.classes == ("ant", "bee", "cow", "dog")
    assert listing(scan) == [(b"ant/1.jpg", 0), (b"dog/1.jpg", 3)]
    assert scan.warnings == ("2 of 4 class folders hold no image (they keep their numbers): bee, cow",)


@pytest.mark.parametrize(
    ("names", "warned"), [(("9", "10", "2"), True), (("0", "1", "2"), False), (("01", "02", "10"), False), (("9", "10", "x"), False)]
)
def test_numeric_classes_keep_text_order_and_say_so(tmp_path: Path, names: tuple[str, ...], warned: bool) -> None:
    scan = source(make(tmp_path, *(f"{name}/1.png" for name in names))).scan()
    assert scan.classes == tuple(sorted(names))
    assert [line for line in scan.warnings if "stands before" not in line] == []
    assert bool(scan.warnings) == warned


def test_numeric_warning_names_a_pair(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "10/1.png", "2/1.png")).scan()
    assert scan.warnings == ("class folders are numbers and are sorted as text, as torchvision does: 10 stands before 2",)


def test_hidden_names_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg", "a/.2.jpg", "a/.thumbs/3.jpg", ".git/4.jpg", "__MACOSX/a/5.jpg", "a/.jpg", "a/__MACOSX/6.jpg")
    scan = source(tmp_path).scan()
    assert scan.keys == [b"a/1.jpg"]
    assert scan.left_out == {"hidden": 6}
    scan = source(tmp_path, hidden=True).scan()
    assert scan.classes == (".git", "__MACOSX", "a")
    assert len(scan.keys) == 7
    assert scan.left_out == {}


def test_odd_names_survive(tmp_path: Path) -> None:
    odd = [
        b"new\nline.jpg",
        b"latin-\xe9.jpg",
        b"x" * 251 + b".jpg",
        b" .jpg",
        b"tab\t.jpg",
        "é.jpg".encode(),
        b"q'uote\".jpg",
        b"\xff\xfe.jpg",
        "漢.jpg".encode(),
        b"a\\b.jpg",
    ]
    make(tmp_path, *(b"cl\xe9ss/" + name for name in odd), b"normal/1.jpg", b"two\nlines/1.jpg")
    src = source(tmp_path)
    scan = src.scan()
    assert scan.classes == ("cl\udce9ss", "normal", "two\nlines")
    assert set(scan.keys) == {b"cl\xe9ss/" + name for name in odd} | {b"normal/1.jpg", b"two\nlines/1.jpg"}
    assert [os.fsdecode(key) for key in scan.keys[:-2]] == sorted(os.fsdecode(key) for key in scan.keys[:-2])
    assert all(src.read(key) == key for key in scan.keys)


def test_wide_characters_sort_as_text_and_not_as_bytes(tmp_path: Path) -> None:
    scan = source(make(tmp_path, b"a/\xff.jpg", "a/￼.jpg".encode())).scan()
    assert scan.keys == [b"a/\xff.jpg", "a/￼.jpg".encode()]  # U+DCFF, then U+FFFC; as bytes it is the other way round


def test_links_are_followed_wherever_they_lead(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "far/1.jpg", "2.jpg")
    raw = make(tmp_path / "raw", "a/0.jpg", "b/")
    (raw / "a/1.jpg").symlink_to(tmp_path / "elsewhere/far/1.jpg")
    (raw / "b/0 again.jpg").symlink_to("../a/0.jpg")
    (raw / "c").symlink_to(tmp_path / "elsewhere")
    os.link(raw / "a/0.jpg", raw / "a/9.jpg")
    src = source(raw)
    scan = src.scan()
    assert listing(scan) == [(b"a/0.jpg", 0), (b"a/1.jpg", 0), (b"a/9.jpg", 0), (b"b/0 again.jpg", 1), (b"c/2.jpg", 2), (b"c/far/1.jpg", 2)]
    assert scan.counts == {"files reached again": 3, "folders": 4, "links to files": 2, "links to folders": 1}
    assert src.read(b"a/1.jpg") == b"far/1.jpg"


@pytest.mark.parametrize("target", ["..", "../..", "../../..", ".", "../deep"])
def test_a_folder_that_contains_itself_is_refused(tmp_path: Path, target: str) -> None:
    raw = make(tmp_path / "raw", "cat/1.jpg", "cat/deep/2.jpg")
    (raw / "cat/deep/loop").symlink_to(target)
    with pytest.raises(SourceError, match=r"cat/deep/loop.* contains itself.*--exclude cat/deep/loop"):
        source(raw).scan()
    assert source(raw, exclude=("cat/deep/loop",)).scan().keys == [b"cat/1.jpg", b"cat/deep/2.jpg"]


def test_two_links_to_one_folder_are_no_loop(tmp_path: Path) -> None:
    raw = make(tmp_path / "raw", "a/1.jpg", "b/")
    (raw / "b/x").symlink_to("../a")
    (raw / "b/y").symlink_to("../a")
    scan = source(raw).scan()
    assert scan.keys == [b"a/1.jpg", b"b/x/1.jpg", b"b/y/1.jpg"]
    assert scan.counts["files reached again"] == 2


def test_what_is_no_regular_file_is_counted_and_never_opened(tmp_path: Path) -> None:
    raw = make(tmp_path, "a/1.jpg")
    os.mkfifo(raw / "a/fifo.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(raw / "a/socket.jpg"))
        (raw / "a/device.jpg").symlink_to("/dev/null")
        scan = source(raw).scan()
    assert scan.keys == [b"a/1.jpg"]
    assert scan.left_out == {"not a regular file": 3}


def test_dangling_links_with_an_extension_are_items(tmp_path: Path) -> None:
    raw = make(tmp_path, "a/1.jpg")
    (raw / "a/2.jpg").symlink_to("gone.jpg")
    (raw / "a/3.jpg").symlink_to("3.jpg")
    (raw / "a/gone").symlink_to("nowhere")
    src = source(raw)
    scan = src.scan()
    assert scan.keys == [b"a/1.jpg", b"a/2.jpg", b"a/3.jpg"]
    assert [tuple(row) for row in scan.stat[1:]] == [(-1, -1, -1, -1)] * 2
    assert "files reached again" not in scan.counts
    for key in scan.keys[1:]:
        with pytest.raises(OSError, match=r"No such file|Too many levels"):
            src.read(key)
        with pytest.raises(OSError, match=r"No such file|Too many levels"):
            src.stat(key)


def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it() -> None:
    with without_privileges() as root:
        make(root, "a/1.jpg", "a/locked/2.jpg")
        (root / "a/locked").chmod(0)
        try:
            with pytest.raises(SourceError, match=r"cannot list folder .*a/locked: Permission denied.*--exclude a/locked"):
                source(root).scan()
            scan = source(root, exclude=("a/locked/",)).scan()
            assert (scan.keys, scan.left_out) == ([b"a/1.jpg"], {"excluded folder": 1})
        finally:
            (root / "a/locked").chmod(0o700)


def test_a_file_that_may_not_be_read_is_an_item_and_its_read_fails() -> None:
    with without_privileges() as root:
        make(root, "a/1.jpg")
        (root / "a/1.jpg").chmod(0)
        assert source(root).scan().keys == [b"a/1.jpg"]
        with pytest.raises(PermissionError):
            source(root).read(b"a/1.jpg")


def test_files_that_may_not_be_looked_at_are_items_without_a_stat() -> None:
    with without_privileges() as root:
        make(root, "a/1.jpg", "a/noext", "b/2.jpg")
        (root / "a").chmod(0o400)  # its names can be listed, its files not reached
        try:
            scan = source(root).scan()
        finally:
            (root / "a").chmod(0o700)
    assert scan.keys == [b"a/1.jpg", b"b/2.jpg"]
    assert scan.stat["size"].tolist() == [-1, len("b/2.jpg")]


def test_include_and_exclude_take_globs_and_exact_keys(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg", "a/2.png", "a/x[1].jpg", "a/x1.jpg", "b/deep/3.jpg", "b/4.jpg", "b/4.txt")
    scan = source(tmp_path, exclude=("a/x[1].jpg",)).scan()
    assert scan.keys == [b"a/1.jpg", b"a/2.png", b"b/4.jpg", b"b/deep/3.jpg"]  # the exact key, and as a glob x1.jpg
    assert scan.left_out == {"excluded": 2, "extension .txt": 1}
    scan = source(tmp_path, include=("*.jpg",), exclude=("b/*", "a/x*")).scan()
    assert scan.keys == [b"a/1.jpg"]
    assert scan.classes == ("a", "b")
    assert scan.left_out == {"excluded": 3, "excluded folder": 1, "extension .txt": 1, "not included": 1}
    scan = source(tmp_path, exclude=("b",)).scan()
    assert scan.classes == ("a",)


def test_patterns_that_match_nothing_are_told(tmp_path: Path) -> None:
    make(tmp_path, "a/1.jpg", "a/2.jpg")
    scan = source(tmp_path, include=("a/*", "q/*"), exclude=("a/2.jpg", "a/3.jpg", "*.jgp", "a/2*")).scan()
    assert scan.warnings == (
        "--include q/* matches nothing",
        "--exclude a/3.jpg matches nothing",
        "--exclude *.jgp matches nothing",
        "--exclude a/2* matches nothing",
    )


@pytest.mark.parametrize("names", [("train/a/1.jpg", "bus/1.jpg"), ("train/1.jpg", "test/1.jpg", "bus/1.jpg")])
def test_classes_that_are_called_like_splits_are_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    scan = source(make(tmp_path, *names)).scan()
    assert scan.classes == tuple(sorted({name.split("/")[0] for name in names}))
    assert scan.splits == ()


def test_no_images_says_what_was_found_instead(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no images in .*: the folder is empty"):
        source(tmp_path).scan()
    make(tmp_path, "a/1.txt", "a/2.TXT", "b/3.csv", "b/noext", ".hidden.jpg")
    with pytest.raises(SourceError, match=r"no images in .*: left out were 2 extension .txt, 1 extension .csv, 1 hidden, 1 no extension$"):
        source(tmp_path).scan()
    with pytest.raises(SourceError, match=r"no images in .*: 1 folder in it, and no file"):
        source(make(tmp_path / "only", "folder/")).scan()


def test_many_odd_extensions_are_folded_into_one_reason(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "1.jpg", *(f"scan.{i:06}" for i in range(100)), "a.txt", "b.txt")).scan()
    assert len(scan.left_out) == 21
    assert scan.left_out["extension .txt"] == 2
    assert scan.left_out["other extensions"] == 81


def test_raw_that_is_missing_or_a_file_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "file.jpg")
    with pytest.raises(SourceError, match="No such file"):
        source(tmp_path / "gone").scan()
    with pytest.raises(SourceError, match="is no folder"):
        source(tmp_path / "file.jpg").scan()
    with pytest.raises(SourceError, match="No such file"):
        source(tmp_path / "gone").location()


def test_read_refuses_what_is_no_regular_file_and_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.jpg")
    with pytest.raises(OSError, match="not a regular file"):
        source(tmp_path).read(b"1.jpg")


def test_read_of_a_file_that_grows_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = source(make(tmp_path, "1.jpg", "2.jpg", "empty.jpg"))
    (tmp_path / "empty.jpg").write_bytes(b"")
    assert src.read(b"empty.jpg") == b""
    real_read = os.read

    def grow(fd: int, count: int) -> bytes:
        data = real_read(fd, count)
        with open(tmp_path / "1.jpg", "ab") as file:
            file.write(b"more")
        return data

    def cut(fd: int, count: int) -> bytes:
        os.truncate(tmp_path / "2.jpg", 2)
        return real_read(fd, count)

    monkeypatch.setattr(os, "read", grow)
    with pytest.raises(OSError, match="changed while read"):
        src.read(b"1.jpg")
    monkeypatch.setattr(os, "read", cut)
    with pytest.raises(OSError, match="changed while read"):
        src.read(b"2.jpg")


def test_read_joins_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read = os.read
    monkeypatch.setattr(os, "read", lambda fd, count: real_read(fd, min(count, 2)))
    assert source(make(tmp_path, "1234567.jpg")).read(b"1234567.jpg") == b"1234567.jpg"


def test_a_file_of_terabytes_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").touch()
    os.truncate(tmp_path / "1.jpg", 2**40)
    with pytest.raises(OSError, match="1099511627776 bytes, more than"):
        source(tmp_path).read(b"1.jpg")


def test_files_without_an_extension_are_decided_by_their_content(tmp_path: Path) -> None:
    make(tmp_path, "a/real", "a/dot.", "a/text", "a/2.png", "a/3.dat")
    for name in ("real", "dot.", "3.dat"):
        (tmp_path / "a" / name).write_bytes(PNG)
    os.mkfifo(tmp_path / "a/fifo")
    scan = FolderSource(str(tmp_path)).scan()
    assert scan.keys == [b"a/2.png", b"a/dot.", b"a/real"]
    assert scan.left_out == {"extension .dat": 1, "no extension, no image": 1, "not a regular file": 1}
    assert source(tmp_path).scan().left_out == {"extension .dat": 1, "no extension": 4}


def test_progress_counts_the_images_found(tmp_path: Path) -> None:
    seen: list[int] = []
    source(make(tmp_path, "a/1.jpg", "a/2.jpg", "b/3.jpg")).scan(seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 3


def test_source_pickles_is_absolute_and_knows_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a/1.jpg")
    monkeypatch.chdir(tmp_path)
    src = FolderSource(".", exclude=("b\udcff", "a"), extensions=TORCHVISION_EXTENSIONS)
    assert src.root == str(tmp_path)
    assert pickle.loads(pickle.dumps(src)) == src
    assert json.loads(json.dumps(src.identity(), ensure_ascii=False).encode()) == {
        "kind": "folder",
        "include": [],
        "exclude": ["a", {"bytes": "b%FF"}],
        "hidden": False,
        "extensions": sorted(TORCHVISION_EXTENSIONS),
    }
    assert src.location() == f"{os.stat(tmp_path).st_dev}:{os.stat(tmp_path).st_ino}"


def test_errors_and_warnings_are_one_printable_line(tmp_path: Path) -> None:
    scan = source(make(tmp_path, b"a\xff\nb/", "c/1.jpg", "c/2.t\nt")).scan()
    with pytest.raises(SourceError) as caught:
        source(make(tmp_path / "x\ny", b"a.\xff")).scan()
    for line in (*scan.warnings, *scan.left_out, str(caught.value)):
        assert line.isprintable()


NAMES = st.sampled_from(["a", "b", "a b", "a-b", "a.b", "A", "é", "10", "9", ".h", "__MACOSX", "z\udcff", "x\ny"])
FILES = st.builds(lambda stem, end: stem + end, NAMES, st.sampled_from([".jpg", ".JPG", ".png", ".txt", "", ".jpg.txt", "jpg", ".webp"]))
TREES = st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=4), FILES), min_size=1, max_size=25)


LINKS = st.lists(st.tuples(st.lists(NAMES, max_size=2), FILES, st.sampled_from(["folder", "file.png", "nowhere"])), max_size=4)


@settings(max_examples=150, deadline=None)
@given(tree=TREES, links=LINKS, hidden=st.booleans())
def test_any_tree_is_listed_as_the_oracle_lists_it(tree: list[tuple[list[str], str]], links: list[tuple[list[str], str, str]], hidden: bool) -> None:
    with tempfile.TemporaryDirectory() as base:
        make(Path(base, "elsewhere"), "file.png", "folder/1.jpg", "folder/a b/2.jpg", "folder/a/3.jpg", "folder/a/notes.txt")
        root = os.path.join(base, "raw")
        os.mkdir(root)
        for folders, name, target in [*((folders, name, "") for folders, name in tree), *links]:
            folder = os.path.join(root, *folders)
            with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError, FileNotFoundError):
                os.makedirs(folder, exist_ok=True)
                if os.path.realpath(folder) != os.path.realpath(root) + folder.removeprefix(root):
                    continue  # within a link: a link there could close a loop, which has a test of its own
                path = os.path.join(folder, name)
                os.symlink(os.path.join(base, "elsewhere", target), path) if target else os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        classes, items = oracle(root, hidden=hidden)
        if not items:
            flat = sorted(name for name in os.listdir(root) if image(os.path.join(root, name), hidden=hidden))
            with contextlib.nullcontext() if flat else pytest.raises(SourceError, match="no images"):
                scan = source(root, hidden=hidden).scan()
                assert (scan.keys, scan.labels, scan.classes) == ([os.fsencode(name) for name in flat], None, None)
            return
        scan = source(root, hidden=hidden).scan()
        assert scan.classes == tuple(classes)
        assert listing(scan) == items


def assert_equals_image_folder(root: str) -> None:
    datasets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")
    expected = datasets.ImageFolder(root, allow_empty=True)
    scan = source(root, hidden=True).scan()
    assert scan.classes == tuple(expected.classes)
    assert listing(scan) == [(os.fsencode(os.path.relpath(path, root)), label) for path, label in expected.samples]


def test_listing_equals_torchvision(tmp_path: Path) -> None:
    folder = pytest.importorskip("torchvision.datasets.folder", reason="torchvision is not installed")
    assert frozenset(folder.IMG_EXTENSIONS) == TORCHVISION_EXTENSIONS
    names = [
        "dog/b.jpg",
        "cat/z.jpg",
        "cat 2/q.jpg",
        "cat/sub/a.jpg",
        "cat/sub 1/a.JPG",
        "cat/sub/x/.h.webp",
        ".h/.jpg",
        "10/a.gif",
        "9/b.tif",
    ]
    make(tmp_path, *names, "é/ü.png", b"\xff\xe9/\xff.png", "empty/", "stray.png")
    (tmp_path / "dog/linked.jpg").symlink_to("b.jpg")
    (tmp_path / "linked").symlink_to("cat")
    (tmp_path / "dog/gone.jpg").symlink_to("nowhere")
    assert_equals_image_folder(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "val"])
def test_real_class_folders_equal_torchvision(split: str) -> None:
    layouts = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if layouts is None:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    assert_equals_image_folder(os.path.join(layouts, "imagefolder", split))


def test_real_splits_have_one_class_map_and_hold_what_their_note_says() -> None:
    layouts = os.environ.get("MMCOMPILE_CORPUS_LAYOUTS")
    if layouts is None:
        pytest.skip("MMCOMPILE_CORPUS_LAYOUTS is not set")
    root = os.path.join(layouts, "imagefolder")
    expected = json.loads(Path(root, "expected.json").read_bytes())
    scan = source(root).scan()
    assert [split.name for split in scan.splits] == ["train", "val"]
    assert scan.classes is not None
    assert sorted({*scan.classes} - {"empty"}) == sorted(expected["train"])  # a copy may have lost its empty folder
    assert scan.labels is not None
    for split in scan.splits:
        counts = np.bincount(scan.labels[split.start : split.stop], minlength=len(scan.classes))
        links = {name: expected["links"].get(f"{split.name}/{name}", 0) for name in expected[split.name]}
        assert {name: int(n) - links[name] for name, n in zip(scan.classes, counts, strict=True) if n} == expected[split.name]
        assert all(key.startswith(split.name.encode() + b"/") for key in scan.keys[split.start : split.stop])
    assert scan.splits[-1].stop == len(scan.keys)
    assert any(warning.endswith(": buildings") and "split val" in warning for warning in scan.warnings)


@pytest.mark.parametrize("names", [("train/a/1.jpg", "val/a/1.jpg", "labels/1.jpg"), ("Train/a/1.jpg", "test/1.jpg", "bus/b/1.jpg", "car/1.jpg")])
def test_splits_beside_other_folders_are_refused_with_what_to_say(tmp_path: Path, names: tuple[str, ...]) -> None:
    others = [name.split("/")[0] for name in names[2:]]
    with pytest.raises(SourceError, match=rf"holds splits \(.*\) beside other folders with images \({', '.join(others)}\)") as caught:
        source(make(tmp_path, *names)).scan()
    assert str(caught.value).isprintable()
    assert source(tmp_path, exclude=tuple(others)).scan().classes == ("a",)
    for text in str(caught.value).split("as in ")[1].split(",")[0].split("--split ")[1:]:
        assert text.strip().split("=")[0] in names[0] + names[1]


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("train/a/1.jpg", "images/1.jpg"), "named like splits"),
        (("train/1.jpg", "test/1.jpg"), "splits without labels"),
        (("images/a/1.jpg", "images/b/1.jpg"), "there is one class"),
        (("data/train/a/1.jpg", "data/val/a/1.jpg"), "there is one class"),
        (
            ("cat/train/1.jpg", "cat/val/2.jpg", "dog/train/1.jpg", "dog/val/1.jpg"),
            "each class, as cat, holds folders named like splits (train, val)",
        ),
    ],
)
def test_a_layout_that_may_not_be_meant_is_warned_of(tmp_path: Path, names: tuple[str, ...], word: str) -> None:
    assert any(word in warning for warning in source(make(tmp_path, *names)).scan().warnings)


def found(scan: Scan) -> dict[str, list[tuple[str, int | None]]]:
    """Each split's keys and labels, in order."""
    items = listing(scan)
    return {split.name: [(os.fsdecode(key), label) for key, label in items[split.start : split.stop]] for split in scan.ranges}


def test_splits_stand_train_first_and_share_one_class_map(tmp_path: Path) -> None:
    make(tmp_path, "val/b/1.jpg", "test/c/1.jpg", "train/a/deep/1.jpg", "train/c/2.jpg", "train/d/", "val/a/", "notes.txt", "test/.git/1.jpg")
    scan = source(tmp_path).scan()
    assert scan.classes == ("a", "b", "c", "d")
    assert found(scan) == {"train": [("train/a/deep/1.jpg", 0), ("train/c/2.jpg", 2)], "val": [("val/b/1.jpg", 1)], "test": [("test/c/1.jpg", 2)]}
    assert [warning for warning in scan.warnings if "keep their numbers" in warning] == [
        "1 of 4 class folders hold no image (they keep their numbers): d",
        "split train has no image of 1 of 4 classes (all keep their numbers): b",
        "split val has no image of 2 of 4 classes (all keep their numbers): a, c",
        "split test has no image of 2 of 4 classes (all keep their numbers): a, b",
    ]
    assert scan.stat["size"].tolist() == [len(key) for key in scan.keys]


@pytest.mark.parametrize(
    "names",
    [
        ("train/a/1.jpg",),
        ("Train/a/1.jpg", "dev/a/1.jpg", "Test/a/1.jpg"),
        ("Training/a/1.jpg", "Test/a/1.jpg"),
        ("valid/a/1.jpg", "docs/x.txt", "new/", ".git/1.jpg"),
    ],
)
def test_splits_keep_the_names_of_their_folders(tmp_path: Path, names: tuple[str, ...]) -> None:
    wanted = [name.split("/")[0] for name in names if name.endswith("a/1.jpg")]
    assert found(source(make(tmp_path, *names)).scan()) == {name: [(f"{name}/a/1.jpg", 0)] for name in wanted}


def test_a_split_without_class_folders_beside_one_with_has_the_label_minus_one(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "train/stray.jpg", "test/2.jpg", "test/1.jpg", "test/thumbs/")).scan()
    assert found(scan) == {"train": [("train/a/1.jpg", 0), ("train/b/1.jpg", 1)], "test": [("test/1.jpg", -1), ("test/2.jpg", -1)]}
    assert scan.classes == ("a", "b")
    assert scan.left_out == {"directly in RAW beside class folders": 1}
    assert f"in no class folder, and so of label -1: 2 images of {tmp_path}/test" in scan.warnings
    assert any(warning.startswith(f"left out, as directly in {tmp_path}/train, beside class folders: 1 image; ") for warning in scan.warnings)


def test_flat_splits_have_no_labels(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "test/1.jpg", "train/2.jpg", "train/1.jpg")).scan()
    assert found(scan) == {"train": [("train/1.jpg", None), ("train/2.jpg", None)], "test": [("test/1.jpg", None)]}
    assert scan.classes is None


def options(root: Path, *splits: str, classes: tuple[str, ...] | None = None) -> FolderSource:
    return source(root, layout=Layout(parse_splits([str(root)], splits), classes))


def test_splits_are_the_folders_that_are_named(tmp_path: Path) -> None:
    make(tmp_path, "new/a/1.jpg", "images/old/b/1.jpg", "images/more/b/2.jpg", "images/rest/a/3.jpg", "stray.jpg", "train/a/4.jpg")
    scan = options(tmp_path, "fine=new", "train=images/old/", "train=./images/more").scan()
    assert found(scan) == {"train": [("images/more/b/2.jpg", 1), ("images/old/b/1.jpg", 1)], "fine": [("new/a/1.jpg", 0)]}
    assert scan.left_out == {"in no split": 3}
    assert any(warning.startswith("left out, as in no split: 3 images; ") for warning in scan.warnings)
    whole = options(tmp_path, "all=.").scan()
    assert (whole.classes, whole.splits, len(whole.keys)) == (("images", "new", "train"), (), 5)
    one = options(tmp_path, "train=.").scan()
    assert [split.name for split in one.splits] == ["train"]
    with pytest.raises(SourceError, match=rf"no images in {tmp_path}/nope: no such folder$"):
        options(tmp_path, "train=new", "val=nope").scan()
    assert options(tmp_path, "a=new").identity() != options(tmp_path, "b=new").identity()
    assert options(tmp_path, "a=new", "b=train").identity() == options(tmp_path, "b=train", "a=new/").identity()
    assert "splits" not in source(tmp_path).identity()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["train"], "expected NAME=FOLDER"),
        (["=a"], "expected NAME=FOLDER"),
        (["a="], "expected NAME=FOLDER"),
        (["a\nb=c"], "'a\\\\nb' is no name of a split"),
        (["../x=c"], "'../x' is no name of a split: expected a printable word, without /"),
        ([" =c"], "' ' is no name of a split"),
        (["..=c"], "no name of a split"),
        ([f"{'x' * 256}=c"], "no name of a split"),
        (["a=/abs"], "expected a folder below RAW"),
        (["a=x/../../y"], "expected a folder below RAW"),
        (["a=x", "b=x/"], "each may be in one split"),
        (["a=x/y", "b=x"], "each may be in one split"),
        (["a=.", "b=x"], "each may be in one split"),
        (["a=x", "all=y"], "called all, .* give it another name"),
        ([f"{i}=f{i}" for i in range(257)], "at most 256"),
    ],
)
def test_splits_that_cannot_be_are_refused(given: list[str], why: str) -> None:
    with pytest.raises(OptionError, match=why) as caught:
        parse_splits(["raw"], given)
    assert caught.value.details["options"] == ["split"]
    assert str(caught.value).isprintable()


def test_a_class_map_that_is_given_fixes_the_numbers(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "val/dog/2.jpg", "val/notes/")
    scan = options(tmp_path, classes=("zebra", "dog", "cat")).scan()
    assert scan.classes == ("zebra", "dog", "cat")
    assert found(scan) == {"train": [("train/dog/1.jpg", 1), ("train/cat/1.jpg", 2)], "val": [("val/dog/2.jpg", 1)]}
    assert "1 of 3 classes have no image here (they keep their numbers)" in scan.warnings
    with pytest.raises(
        SourceError, match=r"1 class folder is not among the 2 names of --classes-from: dog \(nearest: dogs\); in .*/train: "
    ) as caught:
        options(tmp_path, classes=("cat", "dogs")).scan()
    assert str(caught.value).endswith("--exclude train/dog")
    with pytest.raises(SourceError, match="RAW has no class folders"):
        source(make(tmp_path / "flat", "1.jpg"), layout=Layout(classes=("a",))).scan()
    assert options(tmp_path, classes=("a",)).identity() != options(tmp_path, classes=("b",)).identity()


def test_classes_that_look_alike_are_named_with_their_places(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "train/Cat/1.jpg", "val/cat/1.jpg", "train/\u00e9/1.jpg", "val/e\u0301/1.jpg", "val/dog/1.jpg", "train/Dog/")).scan()
    assert scan.classes == ("Cat", "Dog", "cat", "dog", "e\u0301", "\u00e9")
    alike = [warning for warning in scan.warnings if warning.startswith("two classes differ")]
    assert alike == [
        f"two classes differ only in case: Cat in {tmp_path}/train and cat in {tmp_path}/val; if they are one, give their folders one name",
        f"two classes differ only in how their letters are written: e\u0301 in {tmp_path}/val and \u00e9 in {tmp_path}/train; "
        "if they are one, give their folders one name",
    ]
    many = source(make(tmp_path / "many", *(f"{name}{i}/1.jpg" for i in range(8) for name in "xX"))).scan()
    assert many.warnings[-1] == "3 more pairs of classes differ only so"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tree_of_splits_is_listed_split_by_split_as_the_oracle_lists_each(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as base:
        names = data.draw(st.lists(st.sampled_from(["train", "val", "Test", "testing"]), min_size=1, unique=True))
        for name in names:
            for folders, file in data.draw(TREES):
                folder = os.path.join(base, name, *folders)
                with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
                    os.makedirs(folder, exist_ok=True)
                    os.close(os.open(os.path.join(folder, file), os.O_CREAT | os.O_EXCL))
        listed = {name: oracle(os.path.join(base, name)) for name in sorted(names, key=rank)}
        listed = {name: found for name, found in listed.items() if found[1]}
        if not listed:
            return
        scan = source(base).scan()
        classes = sorted({name for found in listed.values() for name in found[0]})
        assert scan.classes == tuple(classes)
        assert [split.name for split in scan.splits] == list(listed)
        wanted = [(f"{name}/".encode() + key, classes.index(own[label])) for name, (own, items) in listed.items() for key, label in items]
        assert listing(scan) == wanted


def test_a_folder_named_like_a_split_without_an_image_is_told(tmp_path: Path) -> None:
    scan = source(make(tmp_path, "train/a/1.jpg", "test/", "val/a/notes.txt", "docs/")).scan()
    assert list(found(scan)) == ["train"]
    assert "no image in test, val, so there is no such split" in scan.warnings
    assert not any("no such split" in warning for warning in source(make(tmp_path / "plain", "a/1.jpg", "test/")).scan().warnings)
