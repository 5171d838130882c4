#!/usr/bin/env bash
# The benchmark kit in one command, about ten minutes on 2 cores, no GPU: against the plain ways, against other libraries, and how it scales.
#   bash scripts/bench.sh [DIR] [option of bench.py ...]      everything goes into DIR (bench/ in the checkout), which should be on a disk
# Sets up DIR/venv with `pip install .[bench]`.  VENV=... uses that environment as it is: nothing is installed into it, and what it lacks is said in
# the tables.  PYTHON=... picks the interpreter.  A torch that this Python has already is used; else one for the CPU is installed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_common.sh"

DIR="$ROOT/bench"
case "${1:-}" in
-h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    echo
    sed -n '2,/^"""/{/^"""/!p}' "$ROOT/scripts/bench.py"
    exit
    ;;
"" | -*) ;;
*)
    DIR="$1"
    shift
    ;;
esac
mkdir -p "$DIR"
DIR="$(cd "$DIR" && pwd -P)"

# Seconds that pip may look for versions that go together, and download them.
TOGETHER_S=1800

# Prints what the extra `bench` asks for, one a line.
asked() {
    "$1" -c 'import configparser, sys; c = configparser.ConfigParser(); c.read(sys.argv[1]); print(c["options.extras_require"]["bench"].strip())' \
        "$ROOT/setup.cfg"
}

install() {
    local pip=("$VENV/bin/python" -m pip install --quiet) torch=() requirement
    if ! "$VENV/bin/python" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4)' >/dev/null 2>&1; then
        torch=("$(grep '^torch==' "$ROOT/scripts/constraints-test.txt")")
    fi
    if timeout "$TOGETHER_S" "${pip[@]}" "${torch[@]}" "$ROOT[bench]"; then
        return
    fi
    echo "not all of $ROOT[bench] could be installed together in $TOGETHER_S s: one after the other"
    "${pip[@]}" "${torch[@]}" "$ROOT[jpeg]"
    asked "$VENV/bin/python" | while read -r requirement; do
        "${pip[@]}" "$requirement" || echo "cannot be installed: $requirement; the tables will say so"
    done
}

if [ -n "${VENV:-}" ]; then
    "$VENV/bin/python" -c 'import torch, numpy, PIL, xxhash, click, tqdm' >/dev/null 2>&1 ||
        die "VENV=$VENV lacks what mmcompile needs; install it there, or leave VENV out"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    VENV="$DIR/venv"
    python="$(find_python)"
    if "$python" -c 'import torch' >/dev/null 2>&1; then
        make_venv "$VENV" --system-site-packages
    else
        make_venv "$VENV"
    fi
    install
fi
exec "$VENV/bin/python" "$ROOT/scripts/bench.py" "$DIR" "$@"
