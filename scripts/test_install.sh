#!/usr/bin/env bash
# test_install.sh: installs into a temporary prefix, moves it, and builds and runs examples/simple.c against what is there.
# Usage: scripts/test_install.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
expected="out[0] = 1, lse[0] = "

# check_program WHAT PROGRAM: runs it with the installed library and compares its first number.
check_program() {
    local said
    said=$(LD_LIBRARY_PATH="$libdir" "$2")
    case $said in
    "$expected"*) echo "install: $1: $said" ;;
    *) echo "install: $1 printed '$said'; '$expected...' was expected" >&2 && exit 1 ;;
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
    flags=$(PKG_CONFIG_PATH="$libdir/pkgconfig" pkg-config --define-variable=prefix="$work/prefix" --cflags --libs flash_dmattn)
    # shellcheck disable=SC2086
    cc -std=c11 -Wall -Werror -o "$work/with_pkg_config" examples/simple.c $flags
    check_program pkg-config "$work/with_pkg_config"
else
    cc -std=c11 -Wall -Werror -o "$work/with_cc" examples/simple.c -I"$work/prefix/include" -L"$libdir" -lflash_dmattn
    check_program cc "$work/with_cc"
    echo "not covered: the file for pkg-config, which is not here"
fi

if command -v cmake >/dev/null; then
    mkdir "$work/cmake"
    cp examples/simple.c "$work/cmake"
    cat >"$work/cmake/CMakeLists.txt" <<'LISTS'
cmake_minimum_required(VERSION 3.16)
project(simple C)
find_package(flash_dmattn 0.1 REQUIRED)
add_executable(simple simple.c)
target_link_libraries(simple PRIVATE flash_dmattn::flash_dmattn)
LISTS
    cmake -S "$work/cmake" -B "$work/cmake/build" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
    cmake --build "$work/cmake/build" >/dev/null
    check_program CMake "$work/cmake/build/simple"
else
    echo "not covered: the package file for CMake, which is not here"
fi

scripts/test_bindings.sh "$work/prefix"
