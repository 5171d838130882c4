"""What the README says is typed here, word for word, from top to bottom, on a small folder of images."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from mmcompile import MMapShardDataset
from tests.readme.blocks import Block, blocks, headings, links
from tests.readme.prepare import planes
from tests.readme.typist import ROOT, Typist, lacks

README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = blocks(README)
#: Where what a library wrote is built to.
MOVED = {
    "ffcv": "ffcv-out/",
    "streaming": "mds-out/",
    "litdata": "litdata-out/",
    "tensordict": "td-out/",
    "mmap_ninja": "ninja-out/",
    "datasets": "hf-out/",
    "webdataset": "tars-out/",
    "torchvision": "photos-out/",
}


class Ray:
    """A cluster in a process of its own, with a pipe that ends it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def address(self, environment: dict[str, str]) -> str:
        pytest.importorskip("ray")
        call = [sys.executable, "-m", "tests.compiler.ray_cluster"]
        env = environment | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self.process = subprocess.Popen(call, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        if self.process is not None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.process.communicate()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)


@pytest.fixture(scope="module")
def typist(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Typist]:
    ray = Ray()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        made = Typist(tmp_path_factory.mktemp("readme"), BLOCKS, lambda: str(request.getfixturevalue("s3_server")), ray.address)
        try:
            yield made
        finally:
            made.stop()
            ray.stop()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(block: Block, typist: Typist) -> None:
    if typist.outcome(block) is None:
        pytest.skip(f"could not import {', '.join(lacks(block))}")


def test_what_a_block_prints_is_what_its_neighbours_say(typist: Typist) -> None:
    for block in BLOCKS:
        if "print(report.samples, report.rejects, report.decoded, report.copied, report.kept)" in block.text:
            assert (typist.outcome(block) or "").split() == ["12", "0", "12", "0", "0"]


@pytest.mark.parametrize(("library", "out"), MOVED.items())
def test_what_another_library_wrote_is_in_the_dataset_made_of_it(typist: Typist, library: str, out: str) -> None:
    told = [block for block in BLOCKS if library in block.needs and out in block.text]
    if not told or typist.outcome(told[0]) is None:
        pytest.skip(f"no block, or no library {library}")
    dataset = MMapShardDataset(typist.place / out)
    images, labels = dataset[range(len(dataset))]
    assert np.array_equal(images.numpy(), planes()["image"])
    assert np.array_equal(labels.numpy(), planes()["label"])


@pytest.mark.parametrize(
    ("markdown", "fault"),
    [
        ("```\nmmcompile build raw/ out/\n```\n", "line 2: no test runs a block marked ''"),
        ("```toml\nx = 1\n```\n", "line 2: no test runs a block marked 'toml'"),
        ("```text\na drawing\n```\n", "line 2: 0 checks know this drawing"),
        ("x\n```bash\ntrue\nmmcompile build nowhere out/\n```\n", "line 4: mmcompile build nowhere out/"),
        ("```bash\npip install 'mmcompile[nonsense]'\n```\n", "setup.cfg has no extra nonsense"),
        ("```bash\nbash scripts/none.sh\n```\n", "no script"),
        ("```python\nx = 1\n```\n```python\nassert x == 2\n```\n", 'File "README.md", line 5'),
        ("```diff\n-x = (\n+x = 1\n```\n", "never closed"),
        ("```diff\n-x = 1\n+x = y\n```\n", "name 'y' is not defined"),
        ("```csv\nfile_name,label,age\na.png,x,none\n```\n", "the columns {'age'} are no fields"),
    ],
)
def test_a_block_that_is_wrong_fails(tmp_path: Path, markdown: str, fault: str) -> None:
    typed = Typist(tmp_path, blocks(markdown), lambda: "", lambda _: "")
    try:
        *before, last = blocks(markdown)
        for block in before:
            typed.outcome(block)
        with pytest.raises((AssertionError, SyntaxError)) as raised:
            typed.outcome(last)
        assert fault in str(raised.value)
    finally:
        typed.stop()


def test_a_block_that_does_not_end_is_an_error() -> None:
    with pytest.raises(AssertionError, match="line 3 does not end"):
        blocks("```sh\n```\n```python\nx = 1\n")


@pytest.mark.parametrize("line", ["  ```python", "- ```sh", "> ~~~", "    mmcompile build raw/ out/", "\tx = 1", "<pre>x = 1</pre>"])
def test_a_block_that_is_written_otherwise_is_an_error_as_nothing_would_run_it(line: str) -> None:
    with pytest.raises(AssertionError, match="line 2 is a block without a fence"):
        blocks(f"\n{line}\n")


#: What a shell says when it is asked for words after these, by the way that it is asked in.
COMPLETIONS = {
    "bash": """{setup}
        COMP_WORDS=(mmcompile build --dtype b); COMP_CWORD=3; _mmcompile_completion mmcompile; echo "${{COMPREPLY[@]}}"
        COMP_WORDS=(mmcompile ver); COMP_CWORD=1; _mmcompile_completion mmcompile; echo "${{COMPREPLY[@]}}"; complete -p mmcompile""",
    "zsh": """autoload -Uz compinit; compinit -u; {setup}
        compadd() {{ print -rl -- ${{(P)@[-1]}} }}; _describe() {{ print -rl -- ${{(P)3}} }}
        words=(mmcompile build --dtype b); CURRENT=4; _mmcompile_completion
        words=(mmcompile ver); CURRENT=2; _mmcompile_completion""",
    "fish": """{setup}
        complete -C "mmcompile build --dtype b"; complete -C "mmcompile ver" """,
}


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_the_lines_for_a_shell_make_it_complete(shell: str, typist: Typist) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    line = r"`(_MMCOMPILE_COMPLETE=fish_source .*?\| source)`" if shell == "fish" else r'`(eval "\$\(_MMCOMPILE_COMPLETE=bash_source .*?)`'
    found = re.search(line, README)
    assert found is not None
    script = COMPLETIONS[shell].format(setup=found[1].replace("bash_source", f"{shell}_source"))
    env = typist.environment | {"HOME": str(typist.place)}
    done = subprocess.run([str(shutil.which(shell)), "-c", script], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert {"bfloat16", "bool", "verify"} <= set(re.split(r"[\s:]+", done.stdout))


def test_every_command_and_option_of_build_stands_in_the_readme() -> None:
    import click

    from mmcompile.cli import program

    for name, command in program.commands.items():
        assert f"mmcompile {name}" in README, name
        for parameter in command.params if name == "build" else []:
            if isinstance(parameter, click.Option):
                assert parameter.opts[-1] in README, parameter.opts[-1]


def test_every_file_and_heading_that_the_readme_links_is_there() -> None:
    found = [target for target in links(README) if "://" not in target]
    assert len(found) > 10
    for target in found:
        path, _, anchor = unquote(target).partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            text = (ROOT / path).read_text("utf-8") if path else README
            assert anchor in headings(text), f"no heading has the anchor {target}"


def test_headings_have_the_anchors_that_github_gives_them() -> None:
    assert headings("# One, `two` & three!\n## Same\n## Same\n```sh\n# no heading\n```\n## A [link](x.md)\n") == [
        "one-two--three",
        "same",
        "same-1",
        "a-link",
    ]
