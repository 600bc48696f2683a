#!/usr/bin/env bash
# test.sh: builds everything and runs every test, C and Python. `make test` calls it after the set-up.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

[ -e build/build.ninja ] || meson setup build -Dstrict=true
meson configure build -Dstrict=true -Dtests=true
ninja -C build --quiet
meson test -C build --print-errorlogs --timeout-multiplier 4
pip install -q --disable-pip-version-check --no-deps --no-build-isolation .
python -m pytest -q tests/python tests/cli
scripts/test_install.sh
echo "not covered here: CUDA devices (this version has no CUDA kernels), AArch64 hardware (run under qemu by .ci/run)"
