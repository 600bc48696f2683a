#!/usr/bin/env bash
# check_emulated.sh: long runs on emulated devices, one process a core. Usage: scripts/check_emulated.sh [MINUTES [SEED]]
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-10} seed=${2:-$(date +%s)000}
checks=$PWD/build/tests/fdm-checks
[ -x "$checks" ] || { echo "build the tests first: scripts/configure.sh -Dtests=true && ninja -C build" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
end=$((SECONDS + 60 * minutes)) cores=$(nproc) devices=(sm_80 sm_89 sm_90 sm_100)
work() { # number of the process
    local n=$1 from
    while [ $SECONDS -lt $end ]; do
        from=$((seed + n * 40))
        "$checks" attention --emulate "${devices[n % 4]}" --seed "$from" --repeat 40 >>"$folder/log$1" 2>&1 || echo "WRONG from $from" >>"$folder/log$1"
        n=$((n + cores))
    done
}
for ((i = 0; i < cores; i++)); do
    FLASH_DMATTN_CACHE_DIR="$folder/cache$i" work "$i" &
done
wait
grep -hE "^(WRONG|FOUND)|replay" "$folder"/log* || true
awk '/ passed, /{ passed += $1; failed += $3 } END { printf "%d problems right, %d wrong, each in three modes\n", passed, failed; exit failed > 0 }' "$folder"/log*
