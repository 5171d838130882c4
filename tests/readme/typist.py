"""Types the README's blocks, from top to bottom, into one working folder, one shell for each block and one Python session."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from mmcompile.format.reader import Reader
from tests.readme.blocks import Block
from tests.readme.drawings import DRAWINGS
from tests.readme.prepare import MAKERS

__all__ = ["ROOT", "Typist", "lacks"]

ROOT = Path(__file__).resolve().parents[2]
#: What a shell finds first: the command and Python of this environment, and what stands for other programs.
PROGRAMS = {
    **{name: f"-m tests.readme.programs {name}" for name in ("pip", "bash", "sbatch", "dask", "ray")},
    "mmcompile": "-m mmcompile",
    "torchrun": "-m torch.distributed.run",
    "python": "",
}
TIMEOUT_S = 300


def lacks(block: Block) -> list[str]:
    """The libraries that a block needs, by what stands behind its mark or in it, and that are not installed."""
    implied = {"tcp://HOST": ("distributed",), "--engine ray": ("ray",), "s3://": ("s3fs", "moto")}
    needs = [*block.needs, *(name for part, names in implied.items() if part in block.text for name in names)]
    return [name for name in needs if importlib.util.find_spec(name) is None]


class Typist:
    """Runs blocks in order: what comes before one that is asked for has run before it.  `outcome` raises what went wrong with it.

    `s3` returns the address of an S3 server, `ray` that of a cluster whose workers know these settings of the environment; neither is asked
    for before a block needs it.
    """

    def __init__(self, place: Path, blocks: list[Block], s3: Callable[[], str], ray: Callable[[dict[str, str]], str]) -> None:
        self.place, self._blocks, self._s3, self._ray = place, blocks, s3, ray
        self.said: dict[Block, str | None] = {}
        self._faults: dict[Block, BaseException] = {}
        self._next = 0
        self._session: subprocess.Popen[str] | None = None
        (place / "scripts").symlink_to(ROOT / "scripts")
        (place / "bin").mkdir()
        for name, words in PROGRAMS.items():
            (place / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (place / "bin" / name).chmod(0o755)
        self._started = place / "started"
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": os.pathsep.join([str(place / "bin"), os.environ["PATH"]]),
            "README_STARTED": str(self._started),
            "DASK_TEMPORARY_DIRECTORY": str(place / "dask"),
        }

    def outcome(self, block: Block) -> str | None:
        """What the block printed; None if it was left out, as `lacks` says."""
        while block not in self.said and block not in self._faults:
            typed = self._blocks[self._next]
            self._next += 1
            try:
                self.said[typed] = None if lacks(typed) else self._run(typed)
            except (AssertionError, subprocess.SubprocessError, SyntaxError, OSError) as fault:
                self._faults[typed] = fault
        if block in self._faults:
            raise self._faults[block]
        return self.said[block]

    def stop(self) -> None:
        """End the session, and what blocks left running."""
        if self._session:
            self._session.kill()
            self._session.communicate()
        for process in self._started.read_text().split() if self._started.exists() else ():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended, and its number be another's
                if b"dask" in Path(f"/proc/{process}/cmdline").read_bytes():
                    os.killpg(int(process), signal.SIGKILL)

    def _run(self, block: Block) -> str:
        runners: dict[str, Callable[[Block], str]] = {
            **dict.fromkeys(("bash", "sh"), self._shell),
            "python": lambda block: self._python(block.text, block.line),
            "diff": self._diff,
            "csv": self._csv,
            "text": self._text,
        }
        assert block.language in runners, (
            f"README.md, line {block.line}: no test runs a block marked {block.language!r}; known are {', '.join(runners)}"
        )
        for name in MAKERS:
            if re.search(rf"(?<![\w/.-]){re.escape(name)}", block.text):
                self._prepare(name)
        return runners[block.language](block)

    def _prepare(self, name: str) -> None:
        if not (self.place / name).exists():
            self._call([sys.executable, "-m", "tests.readme.prepare", name])

    def _call(self, words: list[str], **more: str) -> str:
        call = subprocess.run(
            words,
            cwd=self.place,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=self.environment | more,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert call.returncode == 0, f"{call.stdout}\n{call.stderr}"
        return call.stdout

    def _shell(self, block: Block) -> str:
        """One bash, which ends at the first line that fails and says its number in the README."""
        text, more = self._placed(block.text)
        script = self.place / "typed.sh"
        trap = """trap 'echo "README.md, line $LINENO: $BASH_COMMAND" >&2' ERR"""
        script.write_text(trap + "\n" * (block.line - 1) + text)
        return self._call(["/bin/bash", "-eEuo", "pipefail", str(script)], **more)

    def _placed(self, text: str) -> tuple[str, dict[str, str]]:
        """A shell block with places of this machine where the README names a reader's, and settings of the environment that belong to them."""
        more: dict[str, str] = {}
        if "/share/" in text or "s3://bucket/" in text:
            self._prepare("raw/")
        if "/share/" in text:
            shutil.rmtree(self.place / "share", ignore_errors=True)
            shutil.copytree(self.place / "raw", self.place / "share" / "raw")
            text = text.replace("/share/", f"{self.place}/share/")
        if "s3://bucket/" in text:
            server, bucket = self._s3(), f"s3://bucket-{uuid.uuid4()}"
            more |= {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
            fill = "import sys, s3fs; s3 = s3fs.S3FileSystem(); s3.mkdir(sys.argv[1]); s3.put('raw', sys.argv[1] + '/raw', recursive=True)"
            self._call([sys.executable, "-c", fill, bucket], **more)
            text = text.replace("s3://bucket/", f"{bucket}/").replace("AWS_ENDPOINT_URL=…", f"AWS_ENDPOINT_URL={server}")
        if "--engine ray" in text:
            text = text.replace("HOST:6379", self._ray(self.environment | more))
        if "tcp://HOST:8786" in text:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            text = text.replace("HOST:8786", f"127.0.0.1:{port}").replace("--port 8786", f"--port {port}")
        return text, more

    def _python(self, code: str, line: int) -> str:
        if self._session is None:
            call = [sys.executable, "-W", "error", "-m", "tests.readme.session"]
            self._session = subprocess.Popen(call, cwd=self.place, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._session.stdin is not None
        assert self._session.stdout is not None
        print(json.dumps({"line": line, "code": code}), file=self._session.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._session.stdout.readline() or '{"said": "", "fault": "the session ended"}')
        assert answer["fault"] is None, answer["fault"]
        return str(answer["said"])

    def _diff(self, block: Block) -> str:
        """What stands afterwards is run, and what stood there before, too, if the libraries that it needs stand behind the mark."""
        lines = [line for line in block.text.splitlines() if not line.startswith(("---", "+++", "@@"))]
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != gone) for gone in "+-")
        assert before != after, f"README.md, line {block.line}: a diff that changes nothing"
        compile(textwrap.dedent(before), "README.md", "exec")
        if block.needs:
            self._call([sys.executable, "-c", textwrap.dedent(before)])
        return self._python(textwrap.dedent(after), block.line)

    def _csv(self, block: Block) -> str:
        """A list of images is built, from images of its names."""
        folder = self.place / f"listed-{block.line}"
        found = list(csv.DictReader(block.text.splitlines()))
        for i, row in enumerate(found):
            path = folder / row["file_name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (50 * i, 0, 0)).save(path)
        (folder / "list.csv").write_text(block.text)
        said = self._call([sys.executable, "-m", "mmcompile", "build", f"{folder}/list.csv", f"{folder}-out"])
        index = Reader(Path(f"{folder}-out")).index
        assert index.samples == len(found)
        lost = set(found[0]) - {"file_name", "label", "split"} - {field.name for field in index.fields}
        assert not lost, f"README.md, line {block.line}: the columns {lost} are no fields"
        assert sorted(index.classes or ()) == sorted({row["label"] for row in found})
        return said

    def _text(self, block: Block) -> str:
        """A drawing: what it claims is looked up."""
        checks = [check for pattern, check in DRAWINGS.items() if re.search(pattern, block.text)]
        assert len(checks) == 1, f"README.md, line {block.line}: {len(checks)} checks know this drawing"
        checks[0](block.text, self.place)
        return ""
