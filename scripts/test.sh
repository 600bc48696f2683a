#!/usr/bin/env bash
# test.sh: builds everything and runs every test, C and Python. `make test` calls it after the set-up.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"

[ -e build/build.ninja ] || meson setup build -Dstrict=true
meson configure build -Dstrict=true -Dtests=true
ninja -C build --quiet
meson test -C build --print-errorlogs --timeout-multiplier 4
pip install -q --disable-pip-version-check --no-deps --no-build-isolation -Cbuild-dir=build-wheel .
# Side by side: for most of their time both have one thread.
python -m pytest -q tests/cli tests/scripts >build/pytest.log 2>&1 &
tools=$! failed=0
python -m pytest -q tests/python || failed=1
wait $tools || failed=1
cat build/pytest.log
[ $failed = 0 ]
scripts/test_install.sh
ls /dev/nvidia0 >/dev/null 2>&1 ||
    echo "not covered here: CUDA devices (scripts/check_device.sh and tests/python/test_cuda.py run on a machine with one)"
echo "not covered here: AArch64 hardware (run under qemu by .ci/run)"
