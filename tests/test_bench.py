"""The benchmark kit runs at a tiny size: each part's facts are checked and written down, what is missing is said; no speed is looked at."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
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
