#!/usr/bin/env bash
# compile_all.sh: compiles every specialisation of the CUDA kernels that `fdm-checks compile` lists, for every architecture, without a device, and
# records the result in bench/results/compile/matrix.json: for each architecture and kernel entry date, commit, a key, and how many were
# compiled and spilled. What is recorded there with the same key (same text, constants and compiler) is not compiled again, so a
# run that was interrupted goes on where it stopped, and a changed kernel costs its own compilations alone.
# Usage: scripts/compile_all.sh [MINUTES after which no other entry is begun]
set -euo pipefail
cd "$(dirname "$0")/.."
end=$((SECONDS + 60 * ${1:-100000}))
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
scripts/configure.sh -Dtests=true
ninja -C build --quiet tests/fdm-checks fdm
[ -z "$(git status --porcelain -- src)" ] || { echo "src/ differs from the commit: nothing could be recorded" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
build/tests/fdm-checks compile --list >"$folder/list"
python3 scripts/record.py known >"$folder/known"
for entry in $(grep -vxFf "$folder/known" "$folder/list" | cut -d' ' -f2 | sort -u); do
    [ $SECONDS -lt $end ] || break
    rm -f "$folder/lines"
    build/tests/fdm-checks compile --entry "$entry" --known "$folder/known" --json "$folder/lines" >"$folder/log" 2>&1 || failed=1
    echo "$entry: $(grep -A1 -E '^WRONG|specialisations compiled' "$folder/log" | grep -v '^--')"
    [ ! -e "$folder/lines" ] || python3 scripts/record.py compile "$folder/list" "$folder/lines" || failed=1
    python3 scripts/record.py known >"$folder/known"
done
left=$(grep -vxFf "$folder/known" "$folder/list" | awk '{sum += $3} END {print sum + 0}')
echo "$left specialisations of $(awk '{sum += $3} END {print sum}' "$folder/list") are not recorded"
[ $failed = 0 ] && [ "$left" = 0 ]
