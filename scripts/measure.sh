#!/usr/bin/env bash
# measure.sh: runs the benchmarks behind the tables of docs/measured-cpu.md and writes the results under
# bench/results/DEVICE/. About twenty minutes on two quiet cores. Usage: scripts/measure.sh DEVICE
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:?usage: scripts/measure.sh DEVICE, the name of a folder for the results}
scripts/setup.sh test
export PATH="$PWD/.venv/bin:$PATH"
scripts/configure.sh -Dtests=true
ninja -C build --quiet
pip install -q --disable-pip-version-check --no-deps --no-build-isolation --config-settings=build-dir=build-wheel .
out=$PWD/bench/results/$device
mkdir -p "$out" docs/images
root=$PWD
cd "$(mktemp -d)" # away from the source tree, so that the installed package is measured
bench() { python -m flash_dmattn.bench --peer sdpa-flash "$@"; }

bench --dtype fp32 bf16 fp16 --iters 5 --check --json "$out/grid.json" --csv "$out/grid.csv" --plot "$root/docs/images"
bench --S 512 2048 --D 64 --dtype fp32 bf16 --iters 5 --mode after-torch --json "$out/after_torch.json"
square() { bench --S 2048 --dtype fp32 bf16 fp16 --no-causal --iters 5 "$@"; }
square --mask 0.5 --json "$out/dense_mask.json"
square --pair-bias --json "$out/pair_bias.json"
square --pair-bias --bias-gradient --direction backward --peer sdpa-math --json "$out/pair_bias_gradient.json"
one_thread() { bench --threads 1 --cpu-time --direction forward "$@"; }
no_mask() { one_thread --S 2048 --dtype fp32 bf16 --no-causal --iters 15 "$@"; }
no_mask --json "$out/no_mask_one_thread.json"
no_mask --mask 0.5 --json "$out/dense_mask_one_thread.json"
no_mask --pair-bias --json "$out/pair_bias_one_thread.json"
bench --S 2048 --dtype fp32 bf16 --causal --bias --iters 5 --json "$out/key_bias.json"
bench --S 8192 --D 64 --dtype fp32 bf16 --causal --topk 512 --iters 3 --json "$out/topk.json"
bench --decode --H 32 --Hkv 8 --D 128 --S 32768 --dtype fp32 bf16 fp16 --direction forward --iters 9 --json "$out/decode.json"
bench --B 1 8 --H 4 16 --S 64 128 256 512 --dtype fp32 bf16 fp16 --iters 3 --json "$out/short.json"
"$root/build/bench/cpu-ceilings" >"$out/peaks.json"
for isa in avx2 avx512; do # those that this machine has
    grep -q "\"$isa\"" "$out/peaks.json" || continue
    FLASH_DMATTN_CPU_ISA=$isa one_thread --S 4096 --dtype fp32 --no-causal --iters 3 --json "$out/isa_$isa.json"
done
bench --sweep threads S visible --dtype fp32 --D 64 --iters 3 --json "$out/sweeps.json" --plot "$root/docs/images"
python -m flash_dmattn.bench --overhead --json "$out/overhead.json"
python "$root/scripts/bench_table.py" "$out"
