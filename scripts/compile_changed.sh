#!/usr/bin/env bash
# compile_changed.sh: compiles, of the CUDA kernels whose sources have changed since all were compiled, a part for every
# architecture, and demands that nothing spills. Where the commit of bench/results/compile/matrix.json is not known (none is
# recorded, or a clone without history) a fixed eighth of all is compiled.
# Usage: scripts/compile_changed.sh [AT MOST, default 2000: about ten minutes on two cores]
set -euo pipefail
cd "$(dirname "$0")/.."
at_most=${1:-2000}
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
commit=$(python3 scripts/record.py commit)
if [ -n "$commit" ] && git diff --name-only "$commit" -- src >"$list" 2>/dev/null; then
    echo "$(wc -l <"$list") files of src/ have changed since $commit, at which all were compiled"
    build/tests/fdm-compile --changed "$list" --at-most "$at_most"
else
    echo "no commit is known at which all were compiled"
    build/tests/fdm-compile --share 2/8
fi
