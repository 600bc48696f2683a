#!/usr/bin/env bash
# setup.sh: brings what a make target needs: Debian packages where they are missing, and the Python environment in .venv.
# Usage: scripts/setup.sh build|test|ci|site|languages|release
# languages: for scripts/test_bindings.sh; release: for scripts/release.sh. Both are too slow to get for ci.
set -euo pipefail
cd "$(dirname "$0")/.."
level=${1:-build}

# One word of the table: command or file that proves the package is there.
packages=()
need() { # need PROOF PACKAGE: asks for PACKAGE when PROOF is neither a command nor a file
    command -v "$1" >/dev/null 2>&1 || [ -e "$1" ] || packages+=("$2")
}
need cc build-essential
need python3 python3
python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
case $level in
languages)
    need pkg-config pkg-config
    need cargo cargo
    need go golang-go
    ;;
release)
    need dh debhelper
    need lintian lintian
    need pkg-config pkg-config
    need qemu-aarch64 qemu-user
    need wine wine
    ;;
test | ci)
    need /usr/include/cmocka.h libcmocka-dev
    need pkg-config pkg-config # finds it, and the installed library
    need cmake cmake           # the same
    need abidiff abigail-tools
    header=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null || echo none)
    need "$header" python3-dev
    ;;
esac
if [ "$level" = ci ]; then
    need clang clang
    need clang-format clang-format
    ls /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-x86_64.a >/dev/null 2>&1 || packages+=(libclang-rt-14-dev)
    need qemu-aarch64 qemu-user
    need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
    [ -d /usr/aarch64-linux-gnu/include ] || packages+=(libc6-dev-arm64-cross)
fi
if [ ${#packages[@]} -gt 0 ]; then
    echo "setup: installing Debian packages: ${packages[*]}"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    $as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

wheels=("meson>=1.3,<2" "ninja" "meson-python>=0.16")
case $level in
test | ci) wheels+=("numpy" "torch==2.13.0" "pytest" "pytest-xdist" "matplotlib" "safetensors" "nvidia-cuda-nvrtc>=13,<14" "transformers>=5.17,<5.24" "jax>=0.10") ;;
esac
case $level in
ci | site | release) wheels+=("sphinx>=8.1,<10" "myst-parser>=4,<6" "furo>=2025.12") ;;
esac
[ "$level" = ci ] && wheels+=("mypy==2.4.1" "basedpyright==1.40.2")
[ -x .venv/bin/python ] || python3 -m venv .venv
stamp=.venv/.setup-$(printf '%s\n' "${wheels[@]}" | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
    echo "setup: installing Python packages: ${wheels[*]}"
    .venv/bin/pip install -q --disable-pip-version-check "${wheels[@]}"
    touch "$stamp"
fi
