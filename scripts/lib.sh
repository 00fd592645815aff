# Sourced by the other scripts: one way to make the environment. Changes to the repository root.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${DRAFTC_VENV:-.venv}

say() { printf '\n== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13; do
        # Run it: version managers leave commands on the path that exist but refuse to start.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: draftc needs Python 3.11 or newer; none of python3, python3.11, python3.12, python3.13 is." \
        "Install one and run this again." >&2
    return 1
}

# ensure_env EXTRAS: the environment has draftc (editable) with these extras at the pinned versions.
# A stamp in it names what it was made from, so that an unchanged environment costs nothing.
ensure_env() {
    local extras=$1 python stamp made_from
    python=$(find_python)
    stamp=$venv/draftc-made-from
    made_from="$(cat pyproject.toml constraints.txt | "$python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())') $PWD"
    # "cpu,export" is satisfied by what "cpu,export,dev" made.
    if [[ -f $stamp && $(<"$stamp") == "$made_from $extras"* ]]; then
        return
    fi
    if [[ ! -x $venv/bin/pip ]]; then
        say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    rm -f "$stamp"
    say "installing draftc[$extras] (the first time takes a few minutes)"
    # torch first: asked for by another package, it may come as a CUDA build of several gigabytes.
    # With setuptools pinned and in place, the build needs no isolated environment with an unpinned copy of it.
    "$venv/bin/python" -m pip install --quiet -c constraints.txt torch setuptools
    "$venv/bin/python" -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[$extras]"
    echo "$made_from $extras" >"$stamp"
}
