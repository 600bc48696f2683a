#!/usr/bin/env bash
# sanitize.sh: unit tests, fault tests and random problems under the address and undefined-behaviour sanitizers. The
# thread sanitizer takes the tests that have threads, and random problems on three threads.
# Usage: scripts/sanitize.sh [SEEDS, default 50]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
export TSAN_OPTIONS="suppressions=$PWD/tests/faults/thread_sanitizer.supp"
seeds=${1:-50}
. scripts/draw.sh

build() { # build FOLDER SANITIZERS
    [ -e "$1/build.ninja" ] || meson setup "$1" -Doptimization=1 -Dcli=false -Dtests=true -Db_lundef=false -Db_sanitize="$2" \
        -Dc_args=-fno-sanitize-recover=all
    ninja -C "$1" --quiet
}

build build-asan address,undefined
build build-tsan thread
run_tests() { # run_tests FOLDER [OPTION...]
    meson test -C "$@" --no-rebuild --quiet --print-errorlogs --timeout-multiplier 10 --suite unit --suite faults
}
run_tests build-asan
run_tests build-tsan --no-suite one-thread
# Side by side: the float64 reference, which most of the time goes to, has one thread.
emulated=build-asan/tests/emulator/x86/fdm-checks-x86 # on x86-64
build-asan/tests/fdm-checks attention --seed 3000000 --repeat "$seeds" --rotate &&
    { [ ! -e $emulated ] || $emulated attention --kernel cpu. --seed 8000000 --repeat $((seeds / 3)) --rotate; } &
checks=$!
failed=0
build-tsan/tests/fdm-checks attention --seed 4000000 --repeat "$seeds" --threads 3 --rotate || failed=1
wait $checks || failed=1
exit $failed
