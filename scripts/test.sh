#!/usr/bin/env bash
# Sets up .venv-test and runs the tests; arguments go to pytest.  PYTHON=... picks the interpreter, VENV=... another environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_common.sh"

test_venv
cd "$ROOT"
exec "$VENV/bin/python" -m pytest -q "$@"
