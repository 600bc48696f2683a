#!/usr/bin/env bash
# check_device.sh: what a machine with a CUDA device proves: every CUDA kernel on random problems against float64, the
# Hopper probe, merging, intervals, products and softmax, and all of them under the tools of compute-sanitizer; each instruction against its stand-in. Needs
# Meson, Ninja, a C compiler, g++ and python3.
# Usage: scripts/check_device.sh FOLDER [PROBLEMS] [SEED] [RESULTS]; logs go to FOLDER, a summary to stdout. RESULTS is a file like
# bench/results/nvidia-h200/checks.json: what was found is recorded there; then scripts/verified.py writes docs/verified.md.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/check_device.sh FOLDER [PROBLEMS] [SEED] [RESULTS]} problems=${2:-2000} seed=${3:-1} results=${4:-}
mkdir -p "$folder"
rm -f "$folder"/*.jsonl "$folder"/*.log
[ -e build-device/build.ninja ] || meson setup build-device --buildtype=release -Dtests=true -Dcmocka=disabled >"$folder/setup.log" 2>&1 || exit 1
ninja -C build-device >"$folder/build.log" 2>&1 || { tail -5 "$folder/build.log"; exit 1; }
checks=build-device/tests/fdm-checks probe=build-device/tests/hopper-probe masks="topk interval dense slots key-bias"
cores=$(nproc) failed=0

# Half of the problems are drawn freely; then of few kinds, so that each specialisation, once compiled, runs many, until every kernel has
# done `problems` of them.
part=$(((problems + cores - 1) / cores))
for ((n = 0; n < cores; n++)); do
    {
        $checks attention --cuda --seed $((seed + n * 1000000)) --repeat $((part / 2)) --json "$folder/checks-$n.jsonl"
        $checks attention --cuda --seed $((seed + 500000 + n * 1000000)) --ways 509 --right "$part" --seconds 600 --json "$folder/checks-$n.jsonl"
    } >"$folder/checks-$n.log" 2>&1 &
done
# Small problems seldom get the tiles of 192 query rows: by choice code.
for code in 192x128_K4_Q2_Turns_Dynamic 192x128_Q2_Turns_Static 192x96_Q1_Turns_Static; do
    $checks attention --cuda --kernel "SM90_Wgmma_$code" --seed "$seed" --repeat "$problems" >"$folder/checks-$code.log" 2>&1 &
done
# Tensors whose rows, heads or batches lie 2^31 bytes apart, and more than 65535 batches and heads.
for group in apart 65535; do
    $checks cases --cuda --group $group >"$folder/checks-cases-$group.log" 2>&1
done &
wait
cat "$folder"/checks-*.log >"$folder/checks.log" && rm "$folder"/checks-[0-9]*.log
for group in apart 65535; do
    printf '%-24s %s\n' "cases, $group" \
        "$(grep -hE ' passed, |^not covered' "$folder/checks-cases-$group.log" | paste -sd ' ')"
done
grep -A3 "^WRONG" "$folder/checks.log" && failed=1
awk '/ right, /{right[$1] += $2; wrong[$1] += $4} END {for (k in right) printf "%-24s %6d right, %d wrong\n", k, right[k], wrong[k]}' \
    "$folder/checks.log" | sort

alone() { # alone NAME COMMAND...: a check that prints a line for each problem; NAME is its subject in the records
    local log="$folder/$1.log"
    "${@:2}" >"$log" 2>&1
    case $? in
    0 | 77) ;;
    *) failed=1 ;;
    esac
    grep -E "^(WRONG|skipped|not covered)" "$log" || printf '%-24s %6d right\n' "$1" "$(grep -cE "^(exact|right)\b" "$log")"
}
alone hopper-probe $probe
alone merge-check $checks merge
for mask in $masks; do alone "$mask-check" $checks masks "$mask"; done

$checks gemm --large >"$folder/gemm-check.log" 2>&1 &
for ((n = 0; n < cores; n++)); do
    $checks softmax --large --share $n/$cores >"$folder/softmax-check-$n.log" 2>&1 &
done
wait
grep -hE "^WRONG" "$folder"/{gemm,softmax}-check*.log && failed=1
awk '/ right, /{right[$1] += $2; wrong[$1] += $4} END {for (k in right) printf "%-24s %6d right, %d wrong\n", k, right[k], wrong[k]}' \
    "$folder"/softmax-check-*.log "$folder/gemm-check.log" | sort

log="$folder/instruction-check.log"
scripts/check_instructions.sh "$log" build-device >/dev/null 2>"$folder/instruction-check.err" || failed=1
printf '%-24s %6d agree, %d wrong\n' instruction-check "$(grep -c '^| agrees' "$log")" "$(grep -c '^| WRONG' "$log")"

tool() { # tool NAME LOG COMMAND...: under compute-sanitizer, when fewer than a process a core are running
    local name=$1 log=$2
    shift 2
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
    timeout 400 compute-sanitizer --tool "$name" --print-limit 3 "$@" >"$log" 2>&1 &
}
if command -v compute-sanitizer >/dev/null; then
    for kernel in $(build-device/fdm info | awk '$2 == "available" && $1 !~ /^(cpu|reference)\./ {print $1}'); do
        for name in memcheck racecheck initcheck synccheck; do
            tool $name "$folder/$kernel-$name.log" $checks attention --cuda --kernel "$kernel" --seed $((seed + 77)) --repeat 49 \
                --json "$folder/$kernel-$name.jsonl"
        done
    done
    for name in memcheck racecheck synccheck; do
        tool $name "$folder/hopper-probe-$name.log" $probe --serial
        tool $name "$folder/merge-check-$name.log" $checks merge
        tool $name "$folder/softmax-check-$name.log" $checks softmax --share 17/40
        tool $name "$folder/gemm-check-$name.log" $checks gemm --most 12
        for mask in $masks; do tool $name "$folder/$mask-check-$name.log" $checks masks "$mask" --repeat 40; done
    done
    wait
    for log in "$folder"/*-{memcheck,racecheck,initcheck,synccheck}.log; do
        printf '%-24s %s; %s\n' "$(basename "$log" .log)" "$(grep -o '[A-Z]* SUMMARY.*' "$log" | tail -1)" \
            "$(grep ' passed, ' "$log" | tail -1)"
    done
else
    echo "not covered: compute-sanitizer is not on this machine"
fi
[ -z "$results" ] || python3 scripts/record.py checks "$results" "$folder" || failed=1
exit $failed
