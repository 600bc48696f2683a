#!/usr/bin/env bash
# compile_changed.sh: compiles a part of the CUDA kernels, and demands that nothing spills: of every architecture and kernel
# entry at least one specialisation, a sixty-fourth of all, which changes with the commit, and within a time all that the
# sources concern that have changed since everything was compiled (bench/results/compile/matrix.json). Where that commit is
# not known here, since the twentieth commit before this one; in a clone without history, what the time allows of an eighth of all.
# Usage: scripts/compile_changed.sh [SECONDS for what has changed, default 420]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-420}
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
failed=0

head=$(git rev-parse HEAD)
part=$((16#${head:0:8} % 64))
echo "part $part of 64 of everything, and of each architecture and kernel one"
build/tests/fdm-compile --share "$part/64" || failed=1

commit=$(python3 scripts/record.py commit) known=1
if [ -z "$commit" ] || ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
    commit=$(git rev-list --first-parent --max-count=21 HEAD | tail -1) known=0
    echo "no commit of this clone is known at which all was compiled"
fi
if [ $known = 0 ] && [ "$commit" = "$head" ]; then
    echo "the clone has no history: of part $((part % 8)) of 8 of everything, what $seconds s allow"
    build/tests/fdm-compile --share "$part/8" --seconds "$seconds" || failed=1
else
    git diff --name-only "$commit" -- src >"$list"
    echo "$(wc -l <"$list") files of src/ have changed since $commit"
    build/tests/fdm-compile --changed "$list" --seconds "$seconds" || failed=1
fi
exit $failed
