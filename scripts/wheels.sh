#!/usr/bin/env bash
# wheels.sh: builds wheels for other systems, checks what they need of a system, and runs what this machine can run.
# They come to dist/. Without a target: all. `scripts/wheels.sh --list` names the targets.
# Usage: scripts/wheels.sh [--list] [TARGET ...]
set -euo pipefail
cd "$(dirname "$0")/.."
packages=("ziglang==0.17.1" "meson>=1.3,<2" "meson-python>=0.16" "ninja" "wheel" "lief>=0.16" "numpy" "pytest" "nvidia-cuda-nvrtc>=13,<14" "cyclonedx-python-lib>=8")
python=build-wheels/venv/bin/python
stamp=build-wheels/venv/.setup-$(printf '%s\n' "${packages[@]}" | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
    mkdir -p build-wheels
    python3 -m venv build-wheels/venv
    "$python" -m pip install -q --disable-pip-version-check "${packages[@]}"
    touch "$stamp"
fi
PATH="$PWD/build-wheels/venv/bin:$PATH" exec "$python" scripts/wheels.py "$@"
