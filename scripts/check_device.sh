#!/usr/bin/env bash
# check_device.sh: what a machine with a CUDA device proves: every CUDA kernel on random problems against float64, the
# Hopper probe, and both under tools of compute-sanitizer. Needs Meson, Ninja and a C compiler.
# Usage: scripts/check_device.sh FOLDER [PROBLEMS] [SEED]; logs go to FOLDER, a summary to stdout.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/check_device.sh FOLDER [PROBLEMS] [SEED]} problems=${2:-2000} seed=${3:-1}
mkdir -p "$folder"
[ -e build-device/build.ninja ] || meson setup build-device --buildtype=release >"$folder/setup.log" 2>&1 || exit 1
ninja -C build-device >"$folder/build.log" 2>&1 || { tail -5 "$folder/build.log"; exit 1; }
checks=build-device/tests/fdm-checks
cores=$(nproc) failed=0

part=$(((problems + cores - 1) / cores))
for ((n = 0; n < cores; n++)); do
    $checks --kernel mma --seed $((seed + n * 1000000)) --repeat "$part" >"$folder/checks-$n.log" 2>&1 &
done
wait
cat "$folder"/checks-*.log >"$folder/checks.log" && rm "$folder"/checks-[0-9]*.log
grep -A3 "^WRONG" "$folder/checks.log" && failed=1
awk '/ right, /{right[$1] += $2; wrong[$1] += $4} END {for (k in right) printf "%-14s %6d right, %d wrong\n", k, right[k], wrong[k]}' \
    "$folder/checks.log" | sort

probe=build-device/tests/hopper-probe
$probe >"$folder/probe.log" 2>&1
case $? in
    0 | 77) ;;
    *) failed=1 ;;
esac
grep -E "^(WRONG|skipped)" "$folder/probe.log" || echo "hopper-probe   $(grep -c ^exact "$folder/probe.log") exact"

if command -v compute-sanitizer >/dev/null; then
    for kernel in mma.forward mma.wide mma.decode mma.backward mma.split; do
        for tool in memcheck racecheck initcheck synccheck; do
            timeout 400 compute-sanitizer --tool $tool --print-limit 3 $checks --kernel $kernel --seed $((seed + 77)) \
                --repeat 49 >"$folder/$kernel-$tool.log" 2>&1 &
        done
    done
    for tool in memcheck racecheck synccheck; do
        timeout 400 compute-sanitizer --tool $tool --print-limit 3 $probe --serial >"$folder/probe-$tool.log" 2>&1 &
    done
    wait
    for log in "$folder"/mma.*-*.log "$folder"/probe-*.log; do
        printf '%-24s %s; %s\n' "$(basename "$log" .log)" "$(grep -o '[A-Z]* SUMMARY.*' "$log" | tail -1)" \
            "$(grep ' passed, ' "$log" | tail -1)"
    done
else
    echo "not covered: compute-sanitizer is not on this machine"
fi
exit $failed
