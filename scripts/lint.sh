#!/usr/bin/env bash
# lint.sh: formatting, style rules, the dependency law, and a build without warnings by clang; runs every check and
# fails when one did.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

scripts/configure.sh -Dtests=true || exit 1
ninja -C build --quiet || exit 1

failed=0
check() { # check NAME COMMAND...: runs it and remembers a failure
    local name=$1
    shift
    "$@" || {
        echo "lint: $name failed" >&2
        failed=1
    }
}
mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | sort)
check "clang-format" clang-format --dry-run -Werror "${sources[@]}"
check "includes" python3 scripts/check_includes.py
check "style" python3 scripts/check_style.py build/src/libflash_dmattn.so
check "ABI" python3 scripts/check_abi.py
check "wrappers" python3 scripts/check_wrappers.py
check "mutations" python3 scripts/mutate.py --check
check "selection tables" python3 scripts/selection_table.py build/tests/selection-table --check
check "plans of ordinary problems" python3 scripts/which_kernel.py build/fdm --check
check "verified" python3 scripts/verified.py --check
check "tables of the companions" python3 scripts/companions_table.py --check
check "table of README.md" python3 scripts/readme_table.py --check
check "bindings" python3 scripts/rust_bindings.py --check
check "kernel set" python3 scripts/kernel_set.py --check
check "reference pages" python3 scripts/api_page.py --check
check "docs" python3 scripts/check_docs.py
check "subjects" python3 scripts/check_subjects.py
check "shell syntax" bash -c 'for script in scripts/*.sh .ci/run; do bash -n "$script" || exit 1; done'
lint_rust() {
    cargo clippy --version >/dev/null 2>&1 && cargo fmt --version >/dev/null 2>&1 ||
        { echo "not covered: lint of Rust, no clippy or rustfmt here" && return; }
    (cd bindings/rust && cargo fmt --check) || return
    FLASH_DMATTN_LIB_DIR="$PWD/build/src" CARGO_TARGET_DIR=build/cargo \
        cargo clippy --offline --quiet --all-targets --manifest-path bindings/rust/Cargo.toml -- -D warnings
}
check "Rust" lint_rust
types() { # side by side: each has one thread. What they read is in pyproject.toml
    mypy &
    local mypy=$!
    basedpyright
    local code=$?
    wait $mypy && return $code
}
check "types" types
build_with_clang() {
    [ -e build-clang/build.ninja ] || CC=clang meson setup build-clang -Dstrict=true -Dtests=true >/dev/null || return 1
    ninja -C build-clang --quiet
}
check "clang" build_with_clang
exit $failed
