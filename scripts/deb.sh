#!/usr/bin/env bash
# deb.sh: Debian packages of the last commit into dist/: the library, its development files and the tool, for this
# machine's architecture. lintian must find no error. The packages are installed into a folder of their own, the examples
# are built and run with them, and they are removed again.
# Usage: scripts/deb.sh
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
for pair in dpkg-buildpackage:dpkg-dev dh:debhelper lintian:lintian pkg-config:pkg-config cc:gcc; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} = 0 ] || { echo "deb: install the Debian packages ${missing[*]} first" >&2 && exit 2; }
work=$PWD/build-deb
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
tree=$work/flash-dmattn-$version
rm -rf "$work"
mkdir -p "$tree" dist

git archive HEAD | tar -x -C "$tree"
cp -r "$tree/packaging/debian" "$tree"
grep -qF "($version-" "$tree/debian/changelog" || { echo "deb: packaging/debian/changelog is not of $version" >&2 && exit 1; }
# Debian 12 has meson 1.0.1, which is too old: that of scripts/setup.sh stands in, and dpkg is told not to ask (-d).
ask=() newer_meson="meson (>= 1.3)"
if ! lacks=$(cd "$tree" && LC_ALL=C dpkg-checkbuilddeps 2>&1); then
    lacks=${lacks##*dependencies: }
    [ "$lacks" = "$newer_meson" ] ||
        { echo "deb: install the Debian packages ${lacks/"$newer_meson"/} first" >&2 && exit 2; }
    [ -x .venv/bin/meson ] || scripts/setup.sh build
    PATH="$PWD/.venv/bin:$PATH"
    ask=(-d)
fi
(cd "$tree" && DEB_BUILD_OPTIONS="noautodbgsym parallel=$(nproc)" dpkg-buildpackage -b -us -uc "${ask[@]}") >"$work/log" 2>&1 ||
    { tail -n 40 "$work/log" >&2 && echo "deb: dpkg-buildpackage failed; $work/log has all it said" >&2 && exit 1; }
lintian --allow-root --fail-on error "$work"/*.changes

# Into a folder, as libc6 and its like are no part of it; whether this system has what the packages need is asked apart.
packages=("$work"/*.deb)
names=()
for package in "${packages[@]}"; do names+=("$(dpkg-deb --field "$package" Package)"); done
dpkg --no-act --install "${packages[@]}" >/dev/null
root=$work/root
usr=$root/usr
libdir=$usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)
dpkg_there() { dpkg --root="$root" --force-depends,not-root --log=/dev/null "$@" >"$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2 && exit 1; }; }
mkdir -p "$root/var/lib/dpkg/updates" "$root/var/lib/dpkg/info"
touch "$root/var/lib/dpkg/status"
dpkg_there --install "${packages[@]}"
[ -e "$usr/share/man/man1/fdm.1.gz" ] || { echo "deb: there is no manual page of fdm" >&2 && exit 1; }
LD_LIBRARY_PATH=$libdir "$usr/bin/fdm" --version
# What pkg-config takes for folders of the system would be this one's otherwise.
flags=$(PKG_CONFIG_LIBDIR="$libdir/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 \
    PKG_CONFIG_ALLOW_SYSTEM_LIBS=1 pkg-config --cflags --libs flash_dmattn)
for name in attention_forward attention_backward topw; do
    # shellcheck disable=SC2086
    cc -std=c11 -o "$work/$name" "$usr/share/doc/libflash-dmattn-dev/examples/$name.c" $flags -lm
    LD_LIBRARY_PATH=$libdir "$work/$name"
done
dpkg_there --purge "${names[@]}"
left=$(find "$root" -path "$root/var/lib/dpkg" -prune -o ! -type d -print)
[ -z "$left" ] || { echo "deb: removing the packages left $left" >&2 && exit 1; }
cp "${packages[@]}" dist/
echo "deb: $(basename -a "${packages[@]}" | tr '\n' ' ')were installed into a folder, used and removed; they are in dist"
