#!/usr/bin/env bash
# check_long.sh: what is too long for CI: a million random problems, more planted faults, every specialisation of the CUDA
# kernels (recorded in bench/results/compile), ten minutes of each fuzz target.
# Usage: scripts/check_long.sh [SEEDS, default 100000: about ten problems each] [FUZZ SECONDS, default 600]
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${1:-100000}
export PATH="$PWD/.venv/bin:$PATH"
scripts/configure.sh -Dtests=true
ninja -C build --quiet
# Two processes, each with seeds of its own, so that two cores are busy whatever the number of threads of a problem.
build/tests/fdm-checks attention --seed 20000000 --repeat $((seeds / 2)) --threads 1 >build/check-long-1.log &
first=$!
failed=0
build/tests/fdm-checks attention --seed 30000000 --repeat $((seeds - seeds / 2)) --threads 2 >build/check-long-2.log || failed=1
wait $first || failed=1
tail -n 1 build/check-long-1.log build/check-long-2.log
[ $failed = 0 ] || exit 1
build/tests/fdm-checks broken --repeat 2000
scripts/compile_all.sh
scripts/fuzz.sh "${2:-600}"
