#!/usr/bin/env bash
# configure.sh: sets up the build folder build/, or gives it other options; what is built stays.
# STRICT=true in the environment makes warnings errors.
# Usage: scripts/configure.sh [-DOPTION=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
[ -z "${STRICT:-}" ] || set -- "$@" "-Dstrict=$STRICT"

if [ ! -e build/build.ninja ]; then
    words=(setup build)
elif [ $# -gt 0 ]; then
    words=(configure build)
else
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
meson "${words[@]}" "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
