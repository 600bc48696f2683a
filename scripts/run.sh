#!/usr/bin/env bash
# run.sh: builds the library and the tool, and runs attention with a dynamic top-64 mask, forward and backward, on
# tensors captured from a real sentence model reading real text. `make run` calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
. scripts/stages.sh

stage "set-up" - scripts/setup.sh build
stage "configure" - scripts/configure.sh
stage "build" - compile fdm
stage "run" - build/fdm attend examples/minilm/qkv.safetensors --causal --topk 64 --backward --check
