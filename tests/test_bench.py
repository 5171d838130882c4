"""The benchmark kit runs at a tiny size: each part's facts are checked and written down, what is missing is said; no speed is looked at."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "scripts" / "figures"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), "OMP_NUM_THREADS": "1"}
#: A module of this name stands for a peer that is installed and cannot be imported.
BROKEN = "webdataset"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick run of all parts with one peer that cannot be imported."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "broken").mkdir()
    (folder / "broken" / f"{BROKEN}.py").write_text('raise ImportError("/some/where/lib.so: undefined symbol")\n', "utf-8")
    path = os.pathsep.join([str(folder / "broken"), ENVIRONMENT["PYTHONPATH"]])
    words = ["bench.py", str(folder / "out"), "--quick", "--rows", "64", "--figures", str(folder / "figures")]
    done = run(words, {**ENVIRONMENT, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not judged" in done.stdout
    return folder


def run(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)


def parts(results: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((results / "out" / "results.json").read_text("utf-8"))
    assert document["format"] == 1
    assert document["quick"] is True
    assert {"cores", "memory_gib", "load_1m"} <= set(document["machine"])
    assert {"python", "torch", "numpy"} <= set(document["versions"])
    return {part["part"]: part for part in document["parts"]}


def test_each_part_keeps_its_settings_rounds_and_what_it_does_not_show(results: Path) -> None:
    found = parts(results)
    assert list(found) == ["articles", "peers", "scaling"]
    for part in found.values():
        assert "failed" not in part
        assert part["settings"]["rounds"] == 1
        assert part["hidden"]
        assert part["figures"]
        for figure in part["figures"]:
            assert figure["rounds"]
            assert min(figure["rounds"]) <= figure["median"] <= max(figure["rounds"])
        assert all(target["ok"] is None for target in part["targets"])


def test_all_ways_read_the_same_rows(results: Path) -> None:
    found = parts(results)
    said = {name: {check["what"] for check in part["checks"]} for name, part in found.items()}
    assert {"images: plain and mapped", "records: plain and mapped", "epoch: prepared in each epoch and once"} <= said["articles"]
    assert {"mmcompile: each row once, in order", "mmcompile: each row once, in another order", "limit: each row once, in order"} <= said["peers"]
    assert {"scaling, images: all rows", "scaling, bfloat16: all rows"} <= said["scaling"]
    assert all(check["same"] and check["rows"] for part in found.values() for check in part["checks"])
    assert {check["rows"] for check in found["peers"]["checks"]} == {64}


def test_the_articles_ratios_have_their_targets(results: Path) -> None:
    targets = {target["what"]: target["least"] for target in parts(results)["articles"]["targets"]}
    assert targets["images: mapped, ShardLoader / plain"] == pytest.approx(2.9, abs=0.05)
    assert targets["records: mapped / plain"] == pytest.approx(15, abs=0.5)
    assert targets["records: mapped, gathered ahead / plain"] == pytest.approx(41)
    assert targets["epoch: done once, 1 thread / plain"] == pytest.approx(6.4, abs=0.05)


def test_a_peer_that_is_missing_or_broken_is_said_without_folders(results: Path) -> None:
    missing = parts(results)["peers"]["missing"]
    assert missing["WebDataset"] == "ImportError: lib.so: undefined symbol"
    modules = {"FFCV": "ffcv", "tensordict": "tensordict", "LitData": "litdata", "MosaicML Streaming": "streaming"}
    for name, module in modules.items():
        if importlib.util.find_spec(module) is None:
            assert missing[name] == f"{module} is not installed"
    tables = (results / "out" / "bench.md").read_text("utf-8")
    assert "Not there: WebDataset (ImportError: lib.so: undefined symbol)." in tables


def test_tables_and_plot_say_what_the_document_says(results: Path) -> None:
    for kind in ("md", "svg"):
        assert (results / "figures" / f"bench.{kind}").read_bytes() == (results / "out" / f"bench.{kind}").read_bytes()
    assert (results / "figures" / "bench.json").read_bytes() == (results / "out" / "results.json").read_bytes()
    tables = (results / "out" / "bench.md").read_text("utf-8")
    for part in parts(results).values():
        assert all(f"| {figure['name']} |" in tables for figure in part["figures"])
        assert all(text in tables for text in part["hidden"])
    drawing = ElementTree.parse(results / "out" / "bench.svg").getroot()
    texts = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"mmcompile", "limit: array in memory", "records: mapped / plain"} <= texts
    width = float(drawing.attrib["width"])
    for bar in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        assert bar.attrib["width"] == "100%" or 0 < float(bar.attrib["width"]) < width


def test_nothing_is_left_where_it_ran(results: Path) -> None:
    assert {path.name for path in (results / "out").iterdir()} == {"results.json", "bench.md", "bench.svg"}


def test_other_rows_are_an_error_and_no_figure(tmp_path: Path) -> None:
    script = "import bench_results as r; p = r.Part('x', False, {}, ()); p.checked('ours', 3, True); p.checked('theirs', 3, False)"
    env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), ENVIRONMENT["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert done.stderr == "x: theirs: not the same rows\n"


def test_a_part_that_fails_is_told_and_its_reason_is_not_lost(tmp_path: Path) -> None:
    done = run(["bench.py", str(tmp_path), "--only", "scaling", "--quick", "--rows", "3"], ENVIRONMENT)
    assert done.returncode == 1
    assert "--rows must be at least 16" in done.stderr
    (part,) = json.loads((tmp_path / "results.json").read_text("utf-8"))["parts"]
    assert part["failed"] == "exit code 2"
    assert "scaling failed: exit code 2" in (tmp_path / "bench.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"VENV": "{}/none"}, "VENV={}/none lacks what mmcompile needs; install it there, or leave VENV out"),
        ({"PYTHON": "{}/python"}, "PYTHON={}/python is no Python >= 3.11 (); set PYTHON to one that is"),
    ],
)
def test_bench_sh_says_in_one_line_what_it_lacks(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n", "utf-8")
    (tmp_path / "python").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("VENV", "PYTHON")}
    env |= {name: value.format(tmp_path) for name, value in variables.items()}
    command = ["bash", str(ROOT / "scripts" / "bench.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (1, f"bench.sh: {said.format(tmp_path)}\n")


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    done = run(["bench.py", str(tmp_path), "--only", "articles,speed"], ENVIRONMENT)
    assert done.returncode == 2
    assert "--only speed: the parts are articles, peers, scaling" in done.stderr


#: mmap_ninja as far as the kit uses it, with one value of one row changed.
ANOTHER_ROW = """
import os
import numpy

def from_generator(path, sample_generator, batch_size):
    rows = numpy.stack(list(sample_generator))
    rows[3, 0, 0, 0] ^= 1
    from_ndarray(path, rows)

def from_ndarray(path, array):
    os.makedirs(path)
    numpy.save(f"{path}/all.npy", array)

def open_existing(path):
    return numpy.load(f"{path}/all.npy", mmap_mode="r")
"""


def test_a_peer_that_reads_another_row_ends_its_part_without_a_figure(tmp_path: Path) -> None:
    (tmp_path / "fake" / "mmap_ninja").mkdir(parents=True)
    (tmp_path / "fake" / "mmap_ninja" / "__init__.py").touch()
    (tmp_path / "fake" / "mmap_ninja" / "numpy.py").write_text(ANOTHER_ROW, "utf-8")
    path = os.pathsep.join([str(tmp_path / "fake"), ENVIRONMENT["PYTHONPATH"]])
    done = run(["bench.py", str(tmp_path / "out"), "--only", "peers", "--quick", "--rows", "32"], {**ENVIRONMENT, "PYTHONPATH": path})
    assert done.returncode == 1
    assert "peers: mmap_ninja: each row once, in order: not the same rows" in done.stderr
    (part,) = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))["parts"]
    assert (part["failed"], part["figures"]) == ("exit code 1", [])


# ---------------------------------------------------------------- what the checkout shows


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The document of the checkout, with what the kit makes of it: `md`, `svg`, and each figure as it is shown, by table and name."""
    script = (
        "import json, sys, bench_figures as f, bench_results as r; d = json.load(open(sys.argv[1], encoding='utf-8'))\n"
        "rows = [[x['table'], x['name'], r.shown(x['median'])] for p in d['parts'] for x in p['figures']]\n"
        "targets = {t['what']: [r.shown(t['reached']), t['least']] for p in d['parts'] for t in p['targets']}\n"
        "print(json.dumps({'md': f.markdown(d), 'svg': f.svg(d), 'rows': rows, 'targets': targets, 'document': d}))"
    )
    env = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), ENVIRONMENT["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", script, str(FIGURES / "bench.json")], capture_output=True, text=True, env=env, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", text)


def readme_rows(first: str) -> list[list[str]]:
    """The cells of all rows of the README's table whose first row has this cell."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("|") and [cell.strip() for cell in line.split("|")].count(first))
    table = lines[at + 2 : next(i for i in range(at, len(lines)) if not lines[i].startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_tables_and_plot_of_the_checkout_are_of_its_document(shown: dict[str, Any]) -> None:
    assert (FIGURES / "bench.md").read_text("utf-8") == shown["md"]
    assert (FIGURES / "bench.svg").read_text("utf-8") == shown["svg"]
    document = shown["document"]
    assert not document["quick"]
    assert [part["part"] for part in document["parts"]] == ["articles", "peers", "scaling"]
    assert not any(part["missing"] or "failed" in part for part in document["parts"])
    assert all(ok is not False for part in document["parts"][:1] for ok in (target["ok"] for target in part["targets"]))


def test_the_readme_compares_peers_as_the_document_does(shown: dict[str, Any]) -> None:
    tables: dict[str, dict[str, str]] = {}
    for table, name, value in shown["rows"]:
        tables.setdefault(table.split(",")[0], {})[name] = value
    rows = readme_rows("random epoch")
    assert {row[0] for row in rows} - {"an array in memory"} == set(tables["peers: random epoch"]) - {"limit"}
    columns = ["peers: random epoch", "peers: sequential epoch", "peers: open", "peers: build from JPEG files"]
    for name, *cells in rows:
        for column, unit, cell in zip(columns, ("images/s", "images/s", "ms", "s"), cells, strict=True):
            value = tables[column].get("limit" if name == "an array in memory" else name)
            assert cell == ("" if value is None else f"{value} {unit}"), (name, column)
    ratio = shown["targets"]["peers, random: mmcompile / mmap_ninja"][0]
    assert f"Against mmap_ninja the random epoch is {ratio} times as fast" in (ROOT / "README.md").read_text("utf-8")


def test_the_readme_compares_articles_as_the_document_does(shown: dict[str, Any]) -> None:
    wanted = [
        [f"images: mapped, {way}" for way in ("DataLoader / plain", "ShardLoader / plain", "ShardLoader / plain with workers")],
        ["memory: in a list / mapped"],
        ["records: mapped / plain"],
        ["records: mapped, gathered ahead / plain", "records: mapped, gathered ahead / a bare loop"],
        ["epoch: done once, 1 thread / plain", "epoch: done once, 2 threads / plain with workers"],
    ]
    rows = readme_rows("what articles print, on the same kind of work")
    for row, names in zip(rows, wanted, strict=True):
        assert numbers(row[1].replace("1 / ", "")) == [shown["targets"][name][0] for name in names]
        assert numbers(row[2])[-1] == f"{shown['targets'][names[0]][1]:.2g}"


def test_the_readme_says_how_it_scales_as_the_document_does(shown: dict[str, Any]) -> None:
    part = {name: value for table, name, value in shown["rows"] if not table.startswith("peers: ")}
    wanted = [
        [f"{10**k:,} rows" for k in (3, 4, 5, 6)],
        [f"ShardLoader, {k} threads" for k in (0, 1, 2)],
        [f"DataLoader over the dataset, {k} workers" for k in (0, 1, 2)],
        [f"batches of {k:,}" for k in (32, 128, 256, 1024)],
        ["uint8", "float16", "bfloat16", "float32"],
        ["warm", "cold, engine='mmap'", "cold, engine='pread'"],
    ]
    rows = readme_rows("how it scales, in the first run")
    assert [numbers(row[1]) for row in rows] == [[part[name] for name in names] for names in wanted]
