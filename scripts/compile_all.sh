#!/usr/bin/env bash
# compile_all.sh: compiles every specialisation of the CUDA kernels that fdm-compile lists, for every architecture, without a
# device, and records the result in bench/results/compile/matrix.json: date, commit, and for each architecture and kernel entry
# how many were compiled, failed and spilled. CI compiles mostly what has changed since (scripts/compile_changed.sh).
# Usage: scripts/compile_all.sh [SHARES, default one for every 16 cores: each is a process of up to 16 threads]
set -euo pipefail
cd "$(dirname "$0")/.."
shares=${1:-$((($(nproc) + 15) / 16))}
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
[ -e build/build.ninja ] || meson setup build
ninja -C build --quiet tests/fdm-compile fdm
[ -z "$(git status --porcelain -- src)" ] || { echo "src/ differs from the commit: nothing could be recorded" >&2; exit 2; }
commit=$(git rev-parse --short=7 HEAD) folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0 processes=()
for ((n = 0; n < shares; n++)); do
    build/tests/fdm-compile --share "$n/$shares" --json "$folder/$n.jsonl" >"$folder/$n.log" 2>&1 &
    processes+=($!)
done
for process in "${processes[@]}"; do wait "$process" || failed=1; done
grep -h -A1 "^WRONG" "$folder"/*.log || true
python3 scripts/record.py compile "$commit" "$folder"/*.jsonl || failed=1
exit $failed
