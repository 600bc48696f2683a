#!/usr/bin/env bash
# sanitize.sh: unit tests and random problems under the address and undefined-behaviour sanitizers, then random problems
# on three threads under the thread sanitizer. Usage: scripts/sanitize.sh [SEEDS, default 300]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
seeds=${1:-300}

build() { # build FOLDER SANITIZERS
    [ -e "$1/build.ninja" ] || meson setup "$1" -Dcli=false -Db_lundef=false -Db_sanitize="$2" \
        -Dc_args=-fno-sanitize-recover=all
    ninja -C "$1" --quiet
}

build build-asan address,undefined
meson test -C build-asan --no-rebuild --quiet --print-errorlogs --timeout-multiplier 10 --suite unit --suite faults
build-asan/tests/fdm-checks --seed 3000000 --repeat "$seeds"
build build-tsan thread
meson test -C build-tsan --no-rebuild --quiet --print-errorlogs --timeout-multiplier 10 --suite unit --suite faults
build-tsan/tests/fdm-checks --seed 4000000 --repeat "$seeds" --threads 3
