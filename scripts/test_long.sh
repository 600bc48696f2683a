#!/usr/bin/env bash
# test_long.sh: the tests that `make test` has no time for, and that CI runs beside it: the other half of the random
# problems, planted faults in texts of CUDA kernels, more than 65535 batches, heads, or heads of K and V. Usage:
# scripts/test_long.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# Seeds and shares of the checks move with the commit; each test prints its own.
export PATH="$PWD/.venv/bin:$PATH" FDM_CHECK_SEED=${FDM_CHECK_SEED-$(git rev-parse HEAD 2>/dev/null || true)}
scripts/configure.sh -Dtests=true
ninja -C build --quiet
meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 4 --suite long
