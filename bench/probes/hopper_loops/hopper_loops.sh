#!/bin/sh
# hopper_loops.sh: builds the bare loops by nvcc and runs each on the first device, a process a loop.
# Usage: hopper_loops.sh [DIRECTORY for cubins, logs and loops.json]
set -u
here=$(cd "$(dirname "$0")" && pwd)
to=${1:-$here/build}
mkdir -p "$to" && rm -f "$to/loops.json"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
for file in pair pair128 order4 forward512 roles512; do
    "$nvcc" -std=c++17 -O3 -arch=sm_90a -I "$here/../../../src" -cubin -Xptxas -v -o "$to/$file.cubin" \
        "$here/$file.cu" >"$to/$file.log" 2>&1 || cat "$to/$file.log" &
done
wait
grep -hE 'error|C75|Compiling|spill' "$to"/*.log | sed 's/ptxas info *: //'
for loop in pair_256 pair_256_parts pair_256_no_additions pair_256_no_dq pair_192_128 pair_192_128_no_additions \
    pair_128 order4_plain order4_late order4_late_skewed order4_late_turns order4_late_skewed_no_additions order4_early \
    order4_early_skewed forward_512_ring8 forward_512_ring9 roles_512; do
    timeout 20 python3 "$here/hopper_loops.py" --cubins "$to" --json "$to/loops.json" $loop || echo "$loop: failed ($?)"
done
