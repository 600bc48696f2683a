#!/usr/bin/env bash
# fuzz.sh: runs every fuzz target for some seconds under the address and undefined-behaviour sanitizers, side by side.
# Usage: scripts/fuzz.sh [SECONDS per target, default 60]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
seconds=${1:-60}

[ -e build-fuzz/build.ninja ] || CC=clang meson setup build-fuzz -Dfuzz=true -Dtests=false -Dcli=false -Db_lundef=false \
    -Db_sanitize=address,undefined -Dc_args='-fsanitize=fuzzer-no-link -fno-sanitize-recover=all'
ninja -C build-fuzz --quiet
python3 tests/fuzz/seeds.py build-fuzz/seeds
fuzz() { # fuzz TARGET
    local target=$1 words=()
    mkdir -p "build-fuzz/corpus/$target"
    [ ! -e "tests/fuzz/$target.dict" ] || words=("-dict=tests/fuzz/$target.dict")
    build-fuzz/tests/"$target" -max_total_time="$seconds" -max_len=4096 -timeout=20 -print_final_stats=0 -verbosity=0 \
        "${words[@]}" -artifact_prefix="build-fuzz/$target-" \
        "build-fuzz/corpus/$target" "build-fuzz/seeds/$target" 2>build-fuzz/"$target".log
}
targets=(fuzz_problem fuzz_files) processes=() failed=0
for target in "${targets[@]}"; do
    fuzz "$target" &
    processes+=($!)
done
for n in "${!targets[@]}"; do
    target=${targets[n]}
    if wait "${processes[n]}"; then
        echo "$target: no fault in $seconds s, $(find "build-fuzz/corpus/$target" -type f | wc -l) inputs kept"
    else
        tail -40 build-fuzz/"$target".log
        echo "$target: FAULT; replay: build-fuzz/tests/$target build-fuzz/$target-*"
        failed=1
    fi
done
exit $failed
