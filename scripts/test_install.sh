#!/usr/bin/env bash
# test_install.sh: installs into a temporary prefix, moves it, and builds and runs the C examples against what is there.
# cuda_device.c runs on the emulated device where there is no other.
# Usage: scripts/test_install.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
examples=(attention_forward attention_backward topw two_processes)
warnings=(-std=c11 -Wall -Wextra -Werror)

# run_examples FOLDER: runs the examples that lie there with the installed library.
run_examples() {
    local name
    for name in "${examples[@]}"; do
        LD_LIBRARY_PATH="$libdir" "$1/$name" || { echo "install: $name of $1 failed" >&2 && exit 1; }
    done
}

# run_on_device PROGRAM: on a device of this machine, else on the emulated one, which finds NVRTC's stand-in beside it.
run_on_device() {
    local code=0 emulator=$build/tests/emulator
    LD_LIBRARY_PATH="$libdir" "$1" || code=$?
    if [ $code = 77 ] && [ -e "$emulator/libcuda.so.1" ]; then
        code=0
        FLASH_DMATTN_CACHE_DIR="$work/cache" EMULATED_DEVICES=sm_80 LD_LIBRARY_PATH="$libdir:$emulator" "$1" || code=$?
    fi
    case $code in
    0) ;;
    77) echo "not covered: examples/cuda_device.c was compiled and not run: there is no CUDA device, and no emulated one" ;;
    *) echo "install: $1 failed" >&2 && exit 1 ;;
    esac
}

DESTDIR="$work/stage" meson install -C "$build" --no-rebuild --quiet
prefix=$(meson introspect "$build" --buildoptions |
    python3 -c 'import json, sys; print(next(o["value"] for o in json.load(sys.stdin) if o["name"] == "prefix"))')
mv "$work/stage$prefix" "$work/prefix"
libdir=$(dirname "$(find "$work/prefix" -name libflash_dmattn.so)")
for file in include/flash_dmattn.h bin/fdm share/man/man1/fdm.1; do
    [ -e "$work/prefix/$file" ] || { echo "install: $file is missing" >&2 && exit 1; }
done

# pkg-config writes the prefix it was installed for; the folder was moved.
if command -v pkg-config >/dev/null; then
    echo "install: examples by pkg-config"
    flags=$(PKG_CONFIG_PATH="$libdir/pkgconfig" pkg-config --define-variable=prefix="$work/prefix" --cflags --libs flash_dmattn)
else
    echo "not covered: the file for pkg-config, which is not here"
    flags="-I$work/prefix/include -L$libdir -lflash_dmattn"
fi
for name in "${examples[@]}" cuda_device; do
    # shellcheck disable=SC2086
    cc "${warnings[@]}" -o "$work/$name" "examples/$name.c" $flags -lm
done
run_examples "$work"
run_on_device "$work/cuda_device"

if command -v cmake >/dev/null; then
    echo "install: examples by CMake"
    cmake -S examples -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_C_FLAGS="${warnings[*]:1}" >/dev/null
    cmake --build "$work/cmake" >/dev/null
    run_examples "$work/cmake"
else
    echo "not covered: the package file for CMake, which is not here"
fi

scripts/test_bindings.sh "$work/prefix"
