# Sourced by the other scripts: finds a Python and keeps a virtual environment.  Defines ROOT, die, find_python and make_venv.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# Prints a Python of at least 3.11: $PYTHON if it is set, else the first that does.
find_python() {
    local candidate candidates=(python3 python python3.13 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        die "PYTHON=$PYTHON is no Python >= 3.11 ($("$PYTHON" --version 2>&1 || true)); set PYTHON to one that is"
    fi
    die "no Python >= 3.11 found (python3 is $(python3 --version 2>&1 || true)); install one, or set PYTHON to it"
}

# make_venv DIR [option of venv ...]: makes a virtual environment, or uses the one that is there if its Python and pip still run.
make_venv() {
    local venv="$1" python
    shift
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        die "$venv is there and no virtual environment; move it away"
    fi
    python="$(find_python)"
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$@" "$venv" || die "$python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
}

# The environment of test.sh and check.sh: VENV, or .venv-test in the checkout; installed again only when what is asked for has changed.
test_venv() {
    local wanted stamp
    VENV="${VENV:-$ROOT/.venv-test}"
    make_venv "$VENV"
    stamp="$VENV/mmcompile-installed"
    wanted="$ROOT $(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" "$ROOT/scripts/constraints-test.txt" | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        "$VENV/bin/python" -m pip install --quiet --constraint "$ROOT/scripts/constraints-test.txt" --editable "$ROOT[test]"
        echo "$wanted" >"$stamp"
    fi
}
