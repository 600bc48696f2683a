#!/usr/bin/env bash
# test.sh: sets up, builds everything and runs the tests, C and Python, whatever failed before; says at the end what
# failed, what was not covered and how long each stage took. `make test` calls it.
# scripts/test_long.sh has the tests that take longer.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
. scripts/stages.sh
logs=build/meson-logs
. scripts/draw.sh # each test prints its own seeds and share

build() { scripts/configure.sh -Dtests=true && compile; }
install_package() { pip install -q --disable-pip-version-check --no-deps --no-build-isolation --config-settings=build-dir=build-wheel .; }
python_tests() { # as many processes as processors, up to four: each has PyTorch in memory
    python -m pytest -q --numprocesses=auto --maxprocesses=4 --dist=loadfile --junitxml="$logs/pytest.xml" \
        tests/python tests/cli tests/scripts
}
install_test() { scripts/test_install.sh | tee "$logs/install.txt"; }

stage "set-up" - scripts/setup.sh test
stage "build" - build
mkdir -p "$logs"
rm -f "$logs"/testlog.json "$logs"/pytest.xml "$logs"/install.txt
stage "C tests" "$logs/testlog.json" meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 4 --no-suite long
stage "package" - install_package
stage "Python tests" "$logs/pytest.xml" python_tests
stage "install test" "$logs/install.txt" install_test

python3 scripts/test_summary.py "$stages" $SECONDS
