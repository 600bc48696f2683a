#!/usr/bin/env bash
# test_long.sh: the tests that `make test` has no time for, and of which CI runs a part beside it: other random
# problems, planted faults in texts of CUDA kernels, more than 65535 batches, heads, or heads of K and V. All of them
# include every case of the Python tests that take turns. Usage:
# scripts/test_long.sh [PARTS, default 1: of so many parts of the tests the one that the commit names]
set -euo pipefail
cd "$(dirname "$0")/.."
parts=${1:-1}
# Seeds and shares of the checks move with the commit; each test prints its own.
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" FDM_CHECK_SEED=${FDM_CHECK_SEED-$(git rev-parse HEAD 2>/dev/null || true)}
scripts/configure.sh -Dtests=true
ninja -C build --quiet
number=$(printf '%s' "$FDM_CHECK_SEED" | cksum | cut -d' ' -f1)
mapfile -t tests < <(meson test -C build --list --suite long 2>/dev/null | sed -n 's/^long - [^:]*://p' |
    awk -v parts="$parts" -v part=$((number % parts)) 'NR % parts == part')
echo "${#tests[@]} tests, part $((number % parts)) of $parts"
failed=0
meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 4 "${tests[@]}" || failed=1
if [ "$parts" = 1 ]; then
    pip install -q --disable-pip-version-check --no-deps --no-build-isolation -Cbuild-dir=build-wheel . &&
        FDM_ALL_CASES=1 python -m pytest -q --numprocesses=auto --maxprocesses=4 -m rotates tests/python || failed=1
fi
exit $failed
