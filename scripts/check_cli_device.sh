#!/usr/bin/env bash
# check_cli_device.sh: runs fdm attend and fdm bench on a CUDA device and fails where an output is wrong, a row is missing
# or out of form, or a wrong output goes unseen. Needs Meson, Ninja, a C compiler and python3 (its standard library).
# Usage: scripts/check_cli_device.sh FOLDER; logs go to FOLDER, a summary to stdout.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/check_cli_device.sh FOLDER}
mkdir -p "$folder"
[ -e build-device/build.ninja ] || meson setup build-device --buildtype=release >"$folder/setup.log" 2>&1 || exit 1
ninja -C build-device fdm >"$folder/build.log" 2>&1 || { tail -5 "$folder/build.log"; exit 1; }
fdm=build-device/fdm failed=0
export FLASH_DMATTN_CACHE_DIR="$PWD/build-device/cache"
$fdm info | grep "^CUDA: device 0 is" || { echo "there is no CUDA device here"; exit 1; }

# expect NAME CODE [PATTERN]... -- COMMAND...: the exit code, and extended patterns that its output must hold.
expect() {
    local name=$1 code=$2 patterns=() fault=""
    shift 2
    while [ "$1" != -- ]; do patterns+=("$1") && shift; done
    shift
    local log="$folder/$name.txt" start=$SECONDS
    echo "$ ${*#"$fdm"}" >"$log"
    timeout 300 "$@" >>"$log" 2>&1
    local got=$?
    [ $got = "$code" ] || fault="exit code $got instead of $code"
    for pattern in "${patterns[@]}"; do
        grep -Eq -- "$pattern" "$log" || fault="$fault; no line with: $pattern"
    done
    if [ -n "$fault" ]; then
        failed=1
        printf 'WRONG %-22s %s\n' "$name" "$fault"
        tail -4 "$log" | cut -c1-300
    else
        printf 'ok    %-22s %3d s\n' "$name" $((SECONDS - start))
    fi
}

# DTYPE S H HKV D NAME SCALE: q, k, v, a mask and biases of the rows' keys in $folder/NAME.safetensors; q and k times SCALE.
tensors() {
    python3 - "$@" "$folder" <<'PYTHON'
import json, random, struct, sys

dtype, name, scale, folder = sys.argv[1], sys.argv[6], float(sys.argv[7]), sys.argv[8]
s, h, hkv, d = map(int, sys.argv[2:6])
random.seed(1)


def pack(values):
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] + 0x8000 >> 16 for x in values]
    return struct.pack(f"<{len(values)}H", *bits)


def normal(*shape):
    count = 1
    for extent in shape:
        count *= extent
    return [random.gauss(0, 1) for _ in range(count)]


shapes = {"q": (2, s, h, d), "k": (2, s, hkv, d), "v": (2, s, hkv, d), "bias": (1, hkv, 1, s), "mask": (2, 1, s, s)}
header, data = {}, b""
for key, shape in shapes.items():
    values = normal(*shape)
    part = bytes(x > -1 for x in values) if key == "mask" else pack([x * scale if key in "qk" else x for x in values])
    kind = "BOOL" if key == "mask" else dtype
    header[key] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
    data += part
for file, keys in ((name, "qkv"), (name + "-bias", ["q", "k", "v", "bias"]), (name + "-mask", ["q", "k", "v", "mask"])):
    parts, offset = b"", 0
    chosen = {}
    for key in keys:
        begin, end = header[key]["data_offsets"]
        chosen[key] = header[key] | {"data_offsets": [offset, offset + end - begin]}
        parts += data[begin:end]
        offset += end - begin
    text = json.dumps(chosen).encode()
    with open(f"{folder}/{file}.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text + parts)
PYTHON
}
tensors F16 300 4 2 64 half 1
tensors BF16 257 6 2 80 bfloat 1
tensors F16 256 2 2 64 large 60

# ---- attend ----
half="$folder/half.safetensors" bfloat="$folder/bfloat.safetensors"
on_cuda="^device    cuda:0, sm_" right="out .* ok\$"
expect attend-half 0 "$on_cuda" "$right" "lse .* ok\$" -- $fdm attend "$half" --device cuda --check
expect attend-causal 0 "$on_cuda" "$right" -- $fdm attend "$half" --device cuda:0 --causal --check
expect attend-auto 0 "$on_cuda" "forward   mma" "$right" -- $fdm attend "$bfloat" --check
expect attend-window 0 "$on_cuda" "$right" -- $fdm attend "$bfloat" --device cuda --window 40,3 --softcap 5 --check
expect attend-mask 0 "$on_cuda" "$right" -- $fdm attend "$folder/half-mask.safetensors" --device cuda --check
expect attend-bias 0 "$on_cuda" "$right" -- $fdm attend "$folder/bfloat-bias.safetensors" --device cuda --check
expect attend-topk 0 "$on_cuda" "$right" "visible   7\.|visible   8\." -- \
    $fdm attend "$folder/half-bias.safetensors" --device cuda --causal --topk 24 --check
expect attend-named 0 "choice MMA_SplitQ_ShareQKV_S1_Pad" "$right" -- \
    $fdm attend "$half" --device cuda --kernel MMA_SplitQ_ShareQKV_S1_Pad --check
expect attend-json 0 '"family": "mma"' '"failed": false' -- $fdm attend "$half" --device cuda --check --json
expect attend-cpu 0 "forward   cpu" "$right" -- $fdm attend "$half" --device cpu --check
expect attend-out 0 -- $fdm attend "$half" --device cuda --out "$folder/out-cuda.safetensors"
expect attend-out-cpu 0 -- $fdm attend "$half" --device cpu --out "$folder/out-cpu.safetensors"
expect attend-no-device 2 "CUDA device index is 99; this machine has [0-9]+\$" -- $fdm attend "$half" --device cuda:99
# The sums of these scores overflow float16: what is wrong on the device must be seen. The same in float32 is right.
expect attend-overflow 1 "out +max inf.* WRONG\$" "fdm: out differs from float64 by inf of its row" -- \
    $fdm attend "$folder/large.safetensors" --device cuda --kernel MMA_SplitQ_S2_Swizzle_F16Acc --check
expect attend-no-overflow 0 "$right" -- \
    $fdm attend "$folder/large.safetensors" --device cuda --kernel MMA_SplitQ_S2_Swizzle --check
expect attend-backward 0 "backward  mma" "dq .* ok\$" "dk .* ok\$" "dv .* ok\$" -- \
    $fdm attend "$half" --device cuda --causal --backward --check
expect attend-topk-backward 0 "backward  mma" "dbias .* ok\$" -- \
    $fdm attend "$folder/half-bias.safetensors" --device cuda --causal --topk 24 --backward --check
python3 - "$folder" <<'PYTHON' || failed=1
import json, struct, sys


def out_of(path):
    raw = open(path, "rb").read()
    (length,) = struct.unpack("<Q", raw[:8])
    begin, end = json.loads(raw[8 : 8 + length])["out"]["data_offsets"]
    return struct.unpack(f"<{(end - begin) // 2}e", raw[8 + length + begin : 8 + length + end])


cuda, cpu = out_of(sys.argv[1] + "/out-cuda.safetensors"), out_of(sys.argv[1] + "/out-cpu.safetensors")
worst = max(abs(a - b) for a, b in zip(cuda, cpu, strict=True))
fine = worst < 3e-3 and any(abs(a) > 0.1 for a in cuda)
print("ok   " if fine else "WRONG", f"files of CUDA and CPU     differ by {worst:.2e}, {len(cuda)} elements")
sys.exit(not fine)
PYTHON

# ---- bench ----
causal="--B 2 --H 4 --Hkv 2 --N 1000 --D 64 --causal" bf16="--dtype bf16 --N 777 --Nk 1500 --D 128 --Dv 96"
decode="--B 4 --H 32 --Hkv 8 --N 1 --Nk 8192 --D 128" wide="--H 2 --N 512 --D 512" spec="--B 1 --H 8 --N 8192 --D 64"
kernels=$($fdm info | awk '$1 ~ /^mma\./ && $1 != "mma.backward" {print substr($1, 5)}')
start=$SECONDS # one process compiles one kernel at a time: fill the cache by several
for shape in "$causal" "$bf16" "$wide" "$spec"; do
    for kernel in $kernels; do
        # shellcheck disable=SC2086 # a shape is several words
        $fdm bench --device cuda $shape --show-all --kernel "mma.$kernel" --iters 1 >/dev/null 2>&1 &
        while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    done
done
wait
echo "      kernels compiled       $((SECONDS - start)) s"
number="-?[0-9]+\.[0-9]{8}"
row="\[$number, $number, $number\], time:[0-9]+\.[0-9]{6}ms, TFLOPS:[0-9]+\.[0-9]{2} \([+-][0-9]+\.[0-9]{2}%\)\$"
expect bench-causal 0 "^mma\(forward\+[a-z0-9+]+\): $row" "^mma\(split-q\+stage2\): $row" \
    "^mma\(split-q\+share-qkv\+stage2\): $row" "^mma\(split-kv\+stage1\+swizzle\+f16acc\): $row" \
    "^  mma\(decode\): query rows" -- \
    $fdm bench attention --device cuda $causal --show-all --check --iters 5
expect bench-bf16 0 "^mma\(forward.*: $row" "^mma\(wide.*: $row" "^mma\(split-q\+tiling-qkv.*: $row" -- \
    $fdm bench --device cuda $bf16 --show-all --check --iters 5
expect bench-topk 0 "^mma\(forward.*: $row" -- $fdm bench --device cuda --N 2048 --topk 100 --check --iters 5
expect bench-decode 0 "^mma\(decode.*: $row" -- \
    $fdm bench --device cuda $decode --kernel mma.decode --check --iters 5
expect bench-wide 0 "^mma\(wide.*: $row" "^  mma\(split-q\): head dims are at most 256" -- \
    $fdm bench --device cuda $wide --show-all --check --iters 5
expect bench-backward 0 "^mma\(backward.*: $row" -- $fdm bench --device cuda $causal --pass backward --check --iters 5
expect bench-json 0 '"device": "sm_' '"row": "mma\(split-q\+stage2\)"' -- \
    $fdm bench --N 512 --kernel MMA_SplitQ_S --check --json --iters 3
expect bench-csv 0 "^mma.forward,MMA_Forward_" -- $fdm bench --N 512 --kernel mma.forward --csv --iters 3
expect bench-spec 0 "^mma\(forward.*: $row" -- \
    $fdm bench attention $spec --iters 10 --show-all --check
# Every row that is printed has the form, and every kernel of the list has a row or a reason.
for log in bench-causal bench-bf16 bench-spec; do
    bad=$(grep '^mma(' "$folder/$log.txt" | grep -Evc "^mma\([a-z0-9.+-]+\): $row")
    [ "$bad" = 0 ] || { failed=1 && echo "WRONG $log: $bad rows out of form"; }
    for kernel in $kernels; do
        grep -Fq -e "mma($kernel+" -e "mma($kernel):" "$folder/$log.txt" ||
            { failed=1 && echo "WRONG $log: nothing about mma.$kernel"; }
    done
done
sed -n '/^kernel /,/^left out/p' "$folder/bench-spec.txt" | head -12
exit $failed
