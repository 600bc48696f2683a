#!/usr/bin/env bash
# first_blackwell.sh: what the first machine with a device of compute capability 10.0 or 10.3 is asked: checks, sanitizes and times the
# Blackwell family, beside the peers that are installed, and writes all of it to one file. About half an hour. Needs Meson, Ninja, a C
# compiler, g++ and NVRTC; compute-sanitizer, and python with this package and torch, where they are there.
# Usage: scripts/first_blackwell.sh FILE [emulated]; `emulated`: a rehearsal without the device, with few problems and no times worth reading.
set -uo pipefail
cd "$(dirname "$0")/.."
file=${1:?usage: scripts/first_blackwell.sh FILE [emulated]} rehearsal=${2:-}
build=${BUILD:-build-blackwell} failed=0
checks=$build/tests/fdm-checks fdm=$build/fdm
emulate=() device=cuda problems=4000 share=0/1 lengths=(1024 4096 8192 16384 32768) heads=16 iters=20
if [ "$rehearsal" = emulated ]; then
    emulate=(--emulate sm_100) device=emulated:sm_100 problems=12 share=0/60 lengths=(64) heads=1 iters=1
fi
: >"$file"

section() { printf '\n## %s\n\n' "$*" >>"$file"; printf '%s\n' "$*"; }
run() { # run COMMAND...: its output and how it ended to the file
    local code
    printf '$ %s\n' "$*" >>"$file"
    timeout "${LIMIT:-900}" "$@" >>"$file" 2>&1
    code=$?
    printf 'exit code %d\n\n' $code >>"$file"
    [ $code -eq 0 ] || { failed=1; printf '  exit code %d: %s\n' $code "$*"; }
}

section "machine"
run git log -1 --format='commit %H of %cd'
[ "$rehearsal" = emulated ] && printf 'A rehearsal on the emulated device: no time below means anything.\n\n' >>"$file"
if command -v nvidia-smi >/dev/null; then run nvidia-smi -q -d CLOCK,POWER,MEMORY; fi

section "build"
[ -e $build/build.ninja ] || run meson setup $build --buildtype=release -Dtests=true -Dcmocka=disabled
run ninja -C $build
run $fdm info
run $fdm plan --device sm_100 --head-dim 256 --dtype bf16 --seqlen-q 8192 --explain --resources

section "instructions: each wrapper on the device and on its stand-in"
if [ "$rehearsal" = emulated ]; then
    printf 'not covered: it needs the device\n\n' >>"$file"
else
    run scripts/check_instructions.sh /dev/null $build
fi

section "named cases, then random problems, against float64"
run $checks cases "${emulate[@]}" --share $share --kernel blackwell
run $checks attention "${emulate[@]}" --kernel blackwell --seed 9000000 --repeat $problems

section "compute-sanitizer"
if [ "$rehearsal" != emulated ] && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck synccheck; do
        run compute-sanitizer --tool $tool --print-limit 5 $checks cases --share 0/12 --kernel blackwell
    done
else
    printf 'not covered: compute-sanitizer is not on this machine\n\n' >>"$file"
fi

section "times: every way to run, by length (docs/lab/blackwell_emulated.md asks which shares of exponentials, orders and tiles are best)"
for pass in forward backward; do
    for head_dim in 256 128; do
        for causal in "" --causal; do
            for length in "${lengths[@]}"; do
                run $fdm bench --device $device --B $((16384 / length > 0 && length >= 1024 ? 16384 / length : 1)) --H $heads --N "$length" --D $head_dim \
                    --dtype bf16 --pass $pass ${causal:+"$causal"} --kernel blackwell --iters $iters --show-all
            done
        done
    done
done

section "times beside peers: cuDNN, FlashAttention, FlexAttention, where they are installed"
if [ "$rehearsal" != emulated ] && python3 -c 'import torch, flash_dmattn; assert torch.cuda.is_available()' 2>/dev/null; then
    LIMIT=1800 run python3 -m flash_dmattn.bench --device cuda --cases forward,shapes --check --json "$file.json"
else
    printf 'not covered: python has no torch with CUDA, or not this package\n\n' >>"$file"
fi

section "end: $([ $failed -eq 0 ] && echo 'every command ended well' || echo 'some commands failed: look for exit codes')"
exit $failed
