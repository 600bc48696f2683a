#!/usr/bin/env bash
# release.sh: every file of a release into dist/: the sources, wheels, C archives, wheels of compiled kernels, Debian
# packages, the documentation site, their checksums (SHA256SUMS) and a bill of materials (CycloneDX). It publishes
# nothing, and says so: without --dry-run it ends before the first step. Usage: scripts/release.sh --dry-run
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != --dry-run ]; then
    echo "release: only --dry-run exists: it makes all files in dist/ and publishes nothing" >&2
    exit 2
fi
[ -z "$(git status --porcelain)" ] || { echo "release: the tree has changes that are not committed" >&2 && exit 1; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
for place in "meson.build:version: '$version'" "CITATION.cff:version: $version" "include/flash_dmattn.h:\"$version\"" \
    "CHANGELOG.md:## $version" bindings/rust/flash-dmattn{,-sys}/Cargo.toml:"version = \"$version\""; do
    grep -qF -- "${place#*:}" "${place%%:*}" || { echo "release: ${place%%:*} is not of $version" >&2 && exit 1; }
done
scripts/setup.sh release
rm -rf dist
scripts/deb.sh
scripts/wheels.sh
scripts/site.sh
tar --sort=name --mtime="@$(git log -1 --format=%ct)" --owner=0 --group=0 --numeric-owner \
    --transform "s,^build-site,flash-dmattn-$version-docs," -cJf "dist/flash-dmattn-$version-docs.tar.xz" build-site
build-wheels/venv/bin/python scripts/bill_of_materials.py dist "$version" "$(git rev-parse HEAD)"
(cd dist && sha256sum -- * | tee SHA256SUMS | wc -l | sed "s/\$/ files of $version in dist; nothing was published/")
