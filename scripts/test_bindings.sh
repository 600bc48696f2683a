#!/usr/bin/env bash
# test_bindings.sh: builds and tests the Rust crates and the Go example against an installed library, where cargo and go
# are; scripts/test_install.sh calls it. Usage: scripts/test_bindings.sh PREFIX
set -euo pipefail
prefix=$(realpath "$1")
cd "$(dirname "$0")/.."
libdir=$(dirname "$(find "$prefix" -name libflash_dmattn.so)")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! command -v pkg-config >/dev/null; then
    echo "not covered: Rust and Go, no pkg-config here"
    exit
fi
# The folder may have been moved; the file has the prefix it was installed for.
sed "s|^prefix=.*|prefix=$prefix|" "$libdir/pkgconfig/flash_dmattn.pc" >"$work/flash_dmattn.pc"
export PKG_CONFIG_PATH="$work" LD_LIBRARY_PATH="$libdir" CARGO_TARGET_DIR="$work/target" GOCACHE="$PWD/build/go"
export GOPROXY=off GOTOOLCHAIN=local

crate() { cargo "$1" --offline --quiet --manifest-path bindings/rust/flash-dmattn-sys/Cargo.toml; }
if cargo --version >/dev/null 2>&1; then
    cargo test --offline --quiet --manifest-path bindings/rust/Cargo.toml
    PKG_CONFIG=false FLASH_DMATTN_LIB_DIR="$libdir" crate test
    if said=$(PKG_CONFIG=false crate build 2>&1) || [[ $said != *"or set FLASH_DMATTN_LIB_DIR"* ]]; then
        echo "bindings: without a library the crate's build printed '$said'" >&2 && exit 1
    fi
    echo "bindings: Rust: passed with $(cargo --version)"
else
    echo "not covered: Rust, no cargo here"
fi

if go version >/dev/null 2>&1; then
    cd examples/go
    [ -z "$(gofmt -l .)" ] || { echo "bindings: gofmt would change $(gofmt -l .) in examples/go" >&2 && exit 1; }
    go test -count=1 .
    said=$(go run -buildvcs=false .)
    [[ $said = "out[0] = 1, lse[0] = "* ]] || { echo "bindings: the Go example printed '$said'" >&2 && exit 1; }
    echo "bindings: Go: passed with $(go version)"
else
    echo "not covered: Go, no go here"
fi
