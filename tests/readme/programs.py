"""What stands for programs that a test cannot run as they are: `python -m tests.readme.programs NAME ARGUMENTS`.

pip installs nothing, but knows what this package is called and which extras it has; bash looks whether a script is there and can be parsed; sbatch
runs all jobs of an array here; dask is the real one, in the background, and the call returns when it answers; ray starts nothing, as its servers
belong to a machine and not to a test, which has a cluster of its own.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0


def pip(words: list[str]) -> str | None:
    """Returns what is wrong, as all of these do."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras, name = setup["options.extras_require"], setup["metadata"]["name"]
    for word in words[1:]:
        asked = re.fullmatch(rf"(?:{re.escape(name)}|\.)(?:\[([\w,-]+)\])?", word)
        if asked is None:
            return f"{word} is neither {name} nor a checkout of it"
        if unknown := set((asked[1] or "").split(",")) - {"", *extras}:
            return f"setup.cfg has no extra {', '.join(unknown)}"
    return None if words[:1] == ["install"] and words[1:] else "only pip install is known"


def bash(words: list[str]) -> str | None:
    if not words or not (ROOT / words[0]).is_file():
        return f"no script {words[:1]}"
    return subprocess.run(["/bin/bash", "-n", ROOT / words[0]], capture_output=True, text=True, check=False).stderr or None


def sbatch(words: list[str]) -> str | None:
    parser = argparse.ArgumentParser("sbatch")
    parser.add_argument("--array", required=True)
    parser.add_argument("--wait", action="store_true", required=True)
    parser.add_argument("--wrap", required=True)
    args = parser.parse_args(words)
    first, last = map(int, args.array.split("-"))
    job = {number: {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)} for number in range(first, last + 1)}
    failed = [number for number, env in job.items() if subprocess.run(args.wrap, shell=True, env=env, check=False).returncode]
    return f"jobs {failed} failed" if failed else None


def dask(words: list[str]) -> str | None:
    # what a test that was killed leaves behind ends by itself
    call = [sys.executable, "-m", "dask", *words, *(("--idle-timeout", "300s") if words[0] == "scheduler" else ("--death-timeout", "60"))]
    with open(os.environ["README_STARTED"], "a") as file, open(os.environ["README_STARTED"] + ".log", "a") as log:
        started = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        print(started.pid, file=file)
    if words[0] == "worker":
        ask = "import sys, distributed; distributed.Client(sys.argv[1], timeout=60).wait_for_workers(1, timeout=60)"
        subprocess.run([sys.executable, "-c", ask, words[1]], check=True, timeout=WAIT_S)
        return None
    end = time.monotonic() + WAIT_S
    while started.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", int(words[words.index("--port") + 1]))).close()
        except OSError:
            time.sleep(0.1)
        else:
            return None
    return f"the scheduler ended with {started.poll()}, or did not answer"


def ray(words: list[str]) -> str | None:
    known = words[:1] == ["start"] and ("--head" in words) != (urlsplit("//" + words[-1]).port is not None and "--address" in words)
    return None if known else f"ray {' '.join(words)} is not known"


if __name__ == "__main__":
    fault = {"pip": pip, "bash": bash, "sbatch": sbatch, "dask": dask, "ray": ray}[sys.argv[1]](sys.argv[2:])
    sys.exit(f"{sys.argv[1]}: {fault}" if fault else 0)
