#!/usr/bin/env bash
# compile_changed.sh: compiles a part of the CUDA kernels, and fails where one spills. The part has one specialisation
# at least of every architecture and kernel entry, and one of 384 of all, which changes with the hour
# (scripts/draw.sh). Within a time it also has those that bench/results/compile/matrix.json does not record with the same
# text, constants and compiler (scripts/compile_all.sh).
# Usage: scripts/compile_changed.sh [SECONDS for what is not recorded, default 60]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
known=$(mktemp)
trap 'rm -f "$known"' EXIT
failed=0

. scripts/draw.sh
part=$(drawn_part 384)
echo "part $part of 384 of everything, and of each architecture and kernel one"
build/tests/fdm-checks compile --share "$part/384" || failed=1

python3 scripts/record.py known >"$known"
echo "$(wc -l <"$known") groups are recorded; of the others, what $seconds s allow"
build/tests/fdm-checks compile --known "$known" --seconds "$seconds" || failed=1
exit $failed
