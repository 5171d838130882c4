#!/usr/bin/env bash
# Sets up .venv-test and runs the tests in two processes, each file in one of them, as many tests wait for processes, servers and limits of time;
# arguments go to pytest (`-n 0`: all in one).  PYTHON=... picks the interpreter, VENV=... another environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_common.sh"

test_venv
cd "$ROOT"
exec "$VENV/bin/python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
