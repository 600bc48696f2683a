#!/usr/bin/env bash
# test.sh: sets up, builds everything and runs the tests, C and Python, whatever failed before; says at the end what
# failed, what was not covered and how long each stage took. `make test` calls it.
# scripts/test_long.sh has the tests that take longer.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
. scripts/stages.sh
logs=build/meson-logs
# Seeds and shares of the checks move with the commit; each test prints its own.
export FDM_CHECK_SEED=${FDM_CHECK_SEED-$(git rev-parse HEAD 2>/dev/null || true)}

build() { scripts/configure.sh -Dtests=true && compile; }
install_package() { pip install -q --disable-pip-version-check --no-deps --no-build-isolation -Cbuild-dir=build-wheel .; }
tests_of() { # tests_of REPORT FOLDER...
    python -m pytest -q --junitxml="$@"
}

install_test() { scripts/test_install.sh | tee "$logs/install.txt"; }

stage "set-up" - scripts/setup.sh test
stage "build" - build
mkdir -p "$logs"
rm -f "$logs"/testlog.json "$logs"/pytest-*.xml "$logs"/install.txt
stage "C tests" "$logs/testlog.json" meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 4 --no-suite long
stage "package" - install_package
tool_tests() {
    tests_of "$logs/pytest-tools.xml" tests/cli tests/scripts
    code=$?
    echo $SECONDS >build/pytest.end
    return $code
}
# Side by side: for most of their time both have one thread.
start=$SECONDS
tool_tests >build/pytest.log 2>&1 &
tools=$!
stage "Python tests" "$logs/pytest-python.xml" tests_of "$logs/pytest-python.xml" tests/python
wait $tools
code=$?
cat build/pytest.log
stage_ends "tool and script tests" "$logs/pytest-tools.xml" $code $(($(cat build/pytest.end) - start))
stage "install test" "$logs/install.txt" install_test

python3 scripts/test_summary.py "$stages" $SECONDS
