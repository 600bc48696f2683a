#!/usr/bin/env bash
# test_long.sh: tests that `make test` has no time for, and that CI runs beside it: more than 65535 batches, heads, or
# heads of K and V, on the emulated devices and on the CPU. FDM_CHECK_SEED, by itself the commit, names one of the three.
# Usage: scripts/test_long.sh; five minutes on two quiet cores.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" FDM_CHECK_SEED=${FDM_CHECK_SEED-$(git rev-parse HEAD 2>/dev/null || true)}
# What such problems show is in the results.
export EMULATED_CHECK=0 EMULATED_MODE=early
scripts/configure.sh -Dtests=true
ninja -C build --quiet
checks=build/tests/fdm-checks
many() { $checks cases --group 65535 --share 0/3 --rotate "$@"; }
many --emulate sm_90 --kernel hopper >build/test-long-hopper.log 2>&1 &
hopper=$! failed=0
many --emulate sm_90 --kernel mma || failed=1
many || failed=1
wait $hopper || failed=1
cat build/test-long-hopper.log
many --emulate sm_100 --kernel blackwell || failed=1
exit $failed
