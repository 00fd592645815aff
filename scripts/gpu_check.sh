#!/usr/bin/env bash
# What a machine with a GPU makes of a bundle, in one command and under six minutes:
#   scripts/gpu_check.sh BUNDLE [BUNDLE …]       and writes gpu_check.json (--json FILE)
# Packages and driver, `draftc verify`, plain against speculative decoding at several K with and without CUDA graphs, step
# times at several fills of the cache, memory. Without a driver it says "skipped: no driver" and ends well.
# Uses .venv (or DRAFTC_VENV) if draftc is installed there, else the draftc of the path.
set -euo pipefail
here=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

python=$(realpath -s "$venv")/bin/python
if ! "$python" -c 'import draftc.runtime' 2>/dev/null; then
    python=$(find_python)
    "$python" -c 'import draftc.runtime' 2>/dev/null || {
        echo "error: draftc is not installed: pip install -e '.[tensorrt-rtx]' (or gpu), or name its environment in" \
            "DRAFTC_VENV" >&2
        exit 2
    }
fi
script=$PWD/scripts/gpu_check.py
cd "$here" # bundles and files are named from where the caller is
exec "$python" "$script" "$@"
