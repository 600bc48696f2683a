#!/usr/bin/env bash
# qemu-neon.sh: builds for AArch64 and runs random problems through its kernels under QEMU's user mode.
# Usage: scripts/qemu-neon.sh [SEEDS, default 75]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

[ -e build-aarch64/build.ninja ] ||
    meson setup build-aarch64 --cross-file scripts/cross-aarch64.ini -Dcli=false -Dstrict=true -Dtests=true -Dcmocka=disabled
ninja -C build-aarch64 --quiet tests/fdm-checks
qemu-aarch64 -L /usr/aarch64-linux-gnu build-aarch64/tests/fdm-checks attention --seed 5000000 --repeat "${1:-75}"
