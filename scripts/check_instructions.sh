#!/usr/bin/env bash
# check_instructions.sh: each wrapper of src/cuda/ptx on the first CUDA device and on the emulated one; prints the table.
# Usage: scripts/check_instructions.sh [FILE.md] [BUILD FOLDER, default build]
set -euo pipefail
cd "$(dirname "$0")/.."
check=${2:-build}/tests/emulator/instruction-check
[ -x $check ] || { echo "build the tests first: ninja -C build" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
$check --write "$folder/device"
name=$(head -c 80 "$folder/device" | tr '\0' '\n' | head -n 1)
$check --emulate "$name" --compare "$folder/device" | tee "${1:-/dev/null}"
