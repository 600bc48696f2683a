#!/usr/bin/env bash
# test_long.sh: the tests that `make test` has no time for, and of which CI runs a part beside it: other random
# problems, planted faults in texts of CUDA kernels, more than 65535 batches, heads, or heads of K and V. All of them
# include every case of the Python tests that take turns. Usage:
# scripts/test_long.sh [PARTS, default 1: of so many parts of the tests the one that scripts/draw.sh draws]
set -euo pipefail
cd "$(dirname "$0")/.."
parts=${1:-1}
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
. scripts/draw.sh # each test prints its own seeds and share
scripts/configure.sh -Dtests=true
ninja -C build --quiet
part=$(drawn_part "$parts")
mapfile -t tests < <(meson test -C build --list --suite long 2>/dev/null | sed -n 's/^long - [^:]*://p' |
    awk -v parts="$parts" -v part="$part" 'NR % parts == part')
echo "${#tests[@]} tests, part $part of $parts"
failed=0
meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 4 "${tests[@]}" || failed=1
if [ "$parts" = 1 ]; then
    pip install -q --disable-pip-version-check --no-deps --no-build-isolation --config-settings=build-dir=build-wheel . &&
        FDM_ALL_CASES=1 python -m pytest -q --numprocesses=auto --maxprocesses=4 -m rotates tests/python || failed=1
fi
exit $failed
