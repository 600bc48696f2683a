#!/usr/bin/env bash
# tune_device.sh: what one machine with a CUDA device says of tuning, in ten minutes: tuned choices of products and
# softmaxes against the rules', the same of the held-back problems, and the rules against one fixed tile.
# It never ran on hardware as one command.
# Usage: bench/tune_device.sh FOLDER [FDM] [COMMIT] [SECONDS]; results go to FOLDER, a line for each part to stdout.
# FLASH_DMATTN_KERNEL_ARCHIVE saves the compilation of what it holds.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bench/tune_device.sh FOLDER [FDM] [COMMIT] [SECONDS]} fdm=${2:-build/fdm}
commit=${3:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)} seconds=${4:-570} failed=0
mkdir -p "$folder"
export FLASH_DMATTN_CACHE_DIR=${FLASH_DMATTN_CACHE_DIR:-$folder/cache}
day=$(date -u +%F)

part() { # part NAME PERCENT: of the seconds
    python3 bench/tune_check.py "$1" --fdm "$fdm" --commit "$commit" --seconds-max $((seconds * $2 / 100)) \
        --out "$folder/$day-$1.json" || failed=1
}
part companions 25
part held-back 50
part fixed 25
exit $failed
