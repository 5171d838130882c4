#!/usr/bin/env bash
# Formatting, lint, types and the import rules.  All four run; one that fails fails the script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_common.sh"

test_venv
cd "$ROOT"
failed=""

run() {
    echo "== $*"
    "$VENV/bin/$1" "${@:2}" || failed="${failed:+$failed, }$*"
}

run ruff format --check .
run ruff check .
run mypy --strict
run lint-imports --no-cache
[ -z "$failed" ] || die "failed: $failed"
