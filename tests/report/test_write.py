"""A report end to end, by the command and by the function: what is in the file, and which files are left alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmcompile
from mmcompile.errors import NotADatasetError, OptionError
from mmcompile.report import write_report
from tests.compiler import builds
from tests.format.builders import tree
from tests.support import make_dataset
from tests.test_cli import checked, run
from tests.test_imports import below, packages, pulled_in

#: Elements without an end.
_VOID = {"meta", "link", "img", "br", "hr"}


class Page(HTMLParser):
    """What stands in a page: tags with their attributes, text; and that every element ends where it began."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.text = ""
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def found(self, tag: str) -> list[dict[str, Any]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 3, 12, 16), dtype=np.uint8)
    make_dataset(tmp_path / "out", images, [0] * 4 + [1] * 6, shards=(6, 4), classes=("cat", "dog"))
    return tmp_path / "out"


def test_the_command_writes_a_page_beside_the_dataset(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = tree(out)
    result = run("report", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("out-report.html: ")
    page = Page(tmp_path / "out-report.html")
    assert len(page.found("img")) == 6  # three of each class
    assert all(attrs["alt"] and attrs["src"].startswith("data:image/png;base64,") for attrs in page.found("img"))
    assert [attrs["id"] for attrs in page.found("section")] == ["samples", "classes", "sources", "values", "problems", "settings", "storage"]
    assert tree(out) == before


def test_nothing_in_a_page_names_another_place(out: Path, tmp_path: Path) -> None:
    write_report(out, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert not re.search(r"(?i)https?:|//[a-z]|@import|url\(|<script|javascript:| on[a-z]+=", page.source)
    (policy,) = [attrs["content"] for attrs in page.found("meta") if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert all(attrs["href"].startswith(("#", "data:,")) for attrs in page.found("a") + page.found("link"))


def test_json_is_one_document_of_the_schema(out: Path, tmp_path: Path) -> None:
    document = checked(run("report", str(out), "-o", str(tmp_path / "p.html"), "--json").stdout)
    assert (document["command"], document["file"], document["samples"], len(document["rows"])) == ("report", str(tmp_path / "p.html"), 10, 6)
    assert document["bytes"] == (tmp_path / "p.html").stat().st_size
    document = checked(run("report", str(tmp_path), "-o", str(tmp_path / "p.html"), "--json").stdout)
    assert (document["command"], document["error"]["type"]) == ("report", "NotADatasetError")


def test_a_report_is_replaced_and_any_other_file_is_not(out: Path, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    write_report(out, page)
    write_report(out, page, seed=1)
    page.write_text("<h1>mine</h1>")
    with pytest.raises(OptionError, match="no report of mmcompile's; give another name, or remove it"):
        write_report(out, page)
    assert page.read_text() == "<h1>mine</h1>"
    with pytest.raises(OptionError, match="a folder"):
        write_report(out, tmp_path)


def test_a_page_goes_to_standard_output_alone(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_report("out", tmp_path / "page.html")
    result = run("report", "out", "-o", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes == (tmp_path / "page.html").read_bytes()
    for words, said in ((["--rows", "1"], "name a folder, as in -o pictures/"), (["--json"], "both go to standard output")):
        result = run("report", "out", "-o", "-", *words)
        assert result.exit_code == 2
        assert said in result.stderr + result.stdout
    assert sorted(os.listdir()) == ["out", "page.html"]


def test_a_reader_that_leaves_and_a_full_disk_are_told(out: Path) -> None:
    words = [sys.executable, "-m", "mmcompile", "report", str(out), "-o", "-"]
    env = {**os.environ, "PYTHONPATH": str(Path(mmcompile.__file__).resolve().parents[1])}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as gone:
        done = subprocess.run(words, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_folders_that_are_missing_are_made_as_by_a_build(out: Path, tmp_path: Path) -> None:
    assert run("report", str(out), "-o", str(tmp_path / "deep" / "missing" / "page.html")).exit_code == 0
    assert (tmp_path / "deep" / "missing" / "page.html").is_file()


def test_nothing_is_written_into_the_dataset(out: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(out)
    before = tree(out)
    for place in (out / "report.html", out / "shards" / "x.html", tmp_path / "link" / "x.html", out):
        with pytest.raises(OptionError, match="in the dataset"):
            write_report(out, place)
    assert tree(out) == before


def test_what_is_no_dataset_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotADatasetError):
        write_report(tmp_path, tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


def test_rows_are_png_files_of_exactly_their_pixels(out: Path, tmp_path: Path) -> None:
    result = run("report", str(out), "--rows", "3,7:9", "-o", str(tmp_path / "pics"))
    assert result.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "pics").iterdir()) == ["row-3.png", "row-7.png", "row-8.png"]
    with Image.open(tmp_path / "pics" / "row-7.png") as image:
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), builds.images(out)[7])
    again = run("report", str(out), "--rows", "3", "-o", str(tmp_path / "pics"))
    assert again.exit_code == 0
    (tmp_path / "pics" / "row-3.png").write_bytes(b"mine")
    result = run("report", str(out), "--rows", "3", "-o", str(tmp_path / "pics"))
    assert result.exit_code == 2
    assert "is no report" in result.stderr


@pytest.mark.parametrize("most", [16, 255])
def test_dark_pictures_are_as_dark_in_their_files(tmp_path: Path, most: int) -> None:
    pixels = np.random.default_rng(0).integers(0, most, (2, 3, 8, 8), np.uint8)
    make_dataset(tmp_path / "out", pixels, [0, 1])
    assert run("report", str(tmp_path / "out"), "--rows", "1", "-o", str(tmp_path / "pics")).exit_code == 0
    with Image.open(tmp_path / "pics" / "row-1.png") as image:
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), pixels[1])


def test_rows_without_a_picture_are_no_files(tmp_path: Path) -> None:
    make_dataset(tmp_path / "out", values={"x": np.zeros((3, 2), np.float32)}, keyed=False)
    result = run("report", str(tmp_path / "out"), "--rows", "1", "-o", str(tmp_path / "pics"))
    assert result.exit_code == 2
    assert "hold no picture" in result.stderr
    assert not (tmp_path / "pics").exists()


def test_a_place_that_cannot_be_written_is_named(out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = run("report", str(out), "-o", str(tmp_path / "file" / "p.html"))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'file'}")


def test_rows_on_a_page_are_these_in_that_order(out: Path, tmp_path: Path) -> None:
    made = write_report(out, tmp_path / "p.html", rows=[8, 2])
    assert made.rows == (8, 2)
    assert len(Page(tmp_path / "p.html").found("figure")) == 2


@pytest.mark.parametrize(("words", "said"), [(["--rows", "10"], "has 10 samples"), (["--rows", "x"], "half-open"), (["--rows", "5:5"], "half-open")])
def test_rows_that_there_are_not_are_wrong_usage(out: Path, words: list[str], said: str) -> None:
    result = run("report", str(out), *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_page_needs_neither_torch_nor_pillow(out: Path, tmp_path: Path) -> None:
    modules = pulled_in(f"from mmcompile.report import write_report\nwrite_report({str(out)!r}, {str(tmp_path / 'p.html')!r})")
    assert not packages(modules) & {"torch", "PIL", "click", "tqdm"}
    assert not below(modules, "mmcompile.runtime") | below(modules, "mmcompile.compiler")
    assert not packages(pulled_in("import mmcompile.report")) & {"numpy", "torch"}


@pytest.mark.parametrize("words", [["-o", "pipe.html"], ["--rows", "0", "-o", "pics"]])
def test_a_pipe_in_the_way_is_named_and_not_waited_for(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pics").mkdir()
    for name in ("pipe.html", "pics/row-0.png"):
        os.mkfifo(name)
    # a process of its own, as a thread that opens a pipe cannot be ended
    words = [sys.executable, "-m", "mmcompile", "report", "out", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(mmcompile.__file__).resolve().parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a pipe or a device, and a report is a file" in done.stderr
