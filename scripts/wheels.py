#!/usr/bin/env python3
"""wheels.py: wheels for every system from one machine, by zig's C compiler. scripts/wheels.sh calls it.

The Python files and the metadata come from a wheel that pip builds here; each target's wheel has its own extension and
`fdm` in the place of those. Then three things are checked: the libraries and symbol versions that the binaries need
are those of the target's tag, the wheel has less than MOST_BYTES, and what this machine can run is run: tests/python
in a fresh environment (x86-64 Linux), the C checks of the CPU (musl; Windows where wine is installed; AArch64 where
QEMU is), under wine the tool and the tests of UNIT_TESTS, and under QEMU tests/wheel by Debian's Python for AArch64. The script says of each target what was only built.
Usage: scripts/wheels.sh [--list] [TARGET ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time

import lief

lief.logging.disable()  # it complains of Mach-O sections that it can read

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build-wheels"
DIST = ROOT / "dist"
MOST_BYTES = 5 << 20
RANDOM_PROBLEMS = "60"
EXAMPLES = ("attention_forward", "attention_backward", "topw")  # of C, without a CUDA device
UNIT_TESTS = ("test_cuda_cache", "test_kernel_archive", "test_settings")  # of tests/unit, under wine
VERSION = re.search(r"(?m)^version = \"(.*)\"", (ROOT / "pyproject.toml").read_text())[1]


@dataclasses.dataclass(frozen=True)
class Target:
    triple: str  # of zig
    system: str  # of Meson
    processor: str
    tag: str
    libraries: frozenset[str]  # that the binaries may need
    glibc: tuple[int, ...] = (0,)
    runner: str = ""  # a program that runs its programs here; "-": none is needed; "": there is none

    @property
    def module(self) -> str:
        return "_native.pyd" if self.system == "windows" else "_native.abi3.so"

    @property
    def tool(self) -> str:
        return "fdm.exe" if self.system == "windows" else "fdm"

    @property
    def library(self) -> str:
        """The shared library in the build folder's src, by its whole name."""
        names = {"windows": "libflash_dmattn-0.dll", "darwin": "libflash_dmattn.0.dylib"}
        return names.get(self.system, f"libflash_dmattn.so.{VERSION}")

    @property
    def links(self) -> tuple[str, ...]:
        """The names by which programs and compilers look for it."""
        names = {"windows": (), "darwin": ("libflash_dmattn.dylib",)}
        return names.get(self.system, ("libflash_dmattn.so.0", "libflash_dmattn.so"))

    @property
    def checks(self) -> str:
        return "fdm-checks.exe" if self.system == "windows" else "fdm-checks"


GLIBC = frozenset({"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"})
WINDOWS = frozenset({"kernel32.dll", "advapi32.dll", "python3.dll"})
MACOS = frozenset({"/usr/lib/libSystem.B.dylib"})
MUSL = frozenset({"libc.so", "libc.musl-x86_64.so.1", "libc.musl-aarch64.so.1"})

TARGETS = {
    "manylinux-x86_64": Target("x86_64-linux-gnu.2.17", "linux", "x86_64", "manylinux_2_17_x86_64", GLIBC, (2, 17), "-"),
    "manylinux-aarch64": Target(
        "aarch64-linux-gnu.2.17", "linux", "aarch64", "manylinux_2_17_aarch64", GLIBC, (2, 17), "qemu-aarch64"),
    "musllinux-x86_64": Target("x86_64-linux-musl", "linux", "x86_64", "musllinux_1_2_x86_64", MUSL, runner="-"),
    "musllinux-aarch64": Target(
        "aarch64-linux-musl", "linux", "aarch64", "musllinux_1_2_aarch64", MUSL, runner="qemu-aarch64"),
    "macos-arm64": Target("aarch64-macos.11.0", "darwin", "aarch64", "macosx_11_0_arm64", MACOS),
    "macos-x86_64": Target("x86_64-macos.11.0", "darwin", "x86_64", "macosx_11_0_x86_64", MACOS),
    "windows-x86_64": Target("x86_64-windows-gnu", "windows", "x86_64", "win_amd64", WINDOWS, runner="wine"),
}


def run(*command: str | os.PathLike, **options: object) -> str:
    """Runs a command, and ends with what it printed where it fails."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          **options)
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels: {' '.join(str(word) for word in command)} failed ({done.returncode})")
    return done.stdout


# ---- building ----

PYCONFIG = """/* pyconfig.h of a 64-bit system, for the stable ABI alone; made by scripts/wheels.py */
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#ifdef _WIN32
#    define MS_WINDOWS
#    define MS_WIN64
#    define Py_ENABLE_SHARED 1
#    define HAVE_DECLSPEC_DLL 1
#    define SIZEOF_LONG 4
#    define SIZEOF_WCHAR_T 2
typedef long long Py_ssize_t;
#    define HAVE_PY_SSIZE_T 1
#else
#    define SIZEOF_LONG 8
#    define SIZEOF_WCHAR_T 4
#    define HAVE_SSIZE_T 1
#endif
"""


def symbols_of_python(module: pathlib.Path) -> list[str]:
    """The functions and objects of Python that an extension built here needs."""
    binary = lief.ELF.parse(str(module))
    return sorted(s.name for s in binary.imported_symbols if s.name.startswith(("Py", "_Py")))


def make_headers(native: pathlib.Path) -> pathlib.Path:
    """Python's headers with a configuration for any 64-bit system, and an import library of python3.dll."""
    folder = WORK / "headers"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sysconfig.get_paths()["include"], folder)
    (folder / "pyconfig.h").write_text(PYCONFIG)
    definition = folder / "python3.def"
    objects = ("PyExc_", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_NotImplementedStruct")
    words = [name + (" DATA" if name.startswith(objects) or name.endswith("_Type") else "")
             for name in symbols_of_python(native)]
    definition.write_text("LIBRARY python3.dll\nEXPORTS\n" + "\n".join(words) + "\n")
    run(sys.executable, "-m", "ziglang", "dlltool", "-m", "i386:x86-64", "-d", definition, "-D", "python3.dll", "-l",
        folder / "libpython3.a")
    return folder


def own_apt(folder: pathlib.Path, kind: str, *options: str) -> list[str]:
    """The words of an apt-get that knows `kind` (deb or deb-src) of this machine's release of Debian, in lists of its own."""
    release = re.search(r"(?m)^VERSION_CODENAME=(\w+)$", pathlib.Path("/etc/os-release").read_text())[1]
    known = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages", "Component: main")
    place = next((line.split()[0] for line in known.splitlines() if line.split()[1:] == [release]), None)
    if not place:
        sys.exit(f"wheels: apt knows no place of Debian {release}, whose packages the tests of other systems need")
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(f"{kind} {place} {release} main\n")
    (folder / "status").touch()
    apt = ["apt-get", "-qq", "-o", f"Dir::Etc::sourcelist={folder}/sources.list", "-o", "Dir::Etc::sourceparts=-",
           "-o", f"Dir::State::lists={folder}/lists", "-o", "APT::Sandbox::User=", *options]
    run(*apt, "update")
    return apt


def unpack(tar: tarfile.TarFile, folder: pathlib.Path) -> None:
    """Unpacks an archive; Debian 12's Python has no filters yet."""
    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # type: ignore[attr-defined]
    tar.extractall(folder)


def make_cmocka(target: Target) -> pathlib.Path:
    """A folder with cmocka for the target, from Debian's sources, which apt checks: no package of Debian has it for
    another system."""
    folder = WORK / "cmocka"
    if (folder / "cmocka.pc").exists():
        return folder
    run(*own_apt(folder, "deb-src"), "source", "--download-only", "cmocka", cwd=folder)
    with tarfile.open(next(folder.glob("cmocka_*.orig.tar.*[!c]"))) as tar:
        unpack(tar, folder / "unpacked")
    source = next((folder / "unpacked").iterdir())
    has = [f"-DHAVE_{what}" for what in ("INTTYPES_H", "MALLOC_H", "SIGNAL_H", "STRUCT_TIMESPEC", "GCC_THREAD_LOCAL_STORAGE")]
    zig = [sys.executable, "-m", "ziglang"]
    run(*zig, "cc", "-target", target.triple, "-O1", "-w", *has, "-I", source / "include", "-c", source / "src" / "cmocka.c",
        "-o", folder / "cmocka.o")
    run(*zig, "ar", "rcs", folder / "libcmocka.a", folder / "cmocka.o")
    shutil.copy(source / "include" / "cmocka.h", folder)
    (folder / "cmocka.pc").write_text("Name: cmocka\nDescription: unit tests\nVersion: 1\nCflags: -I${pcfiledir}\n"
                                      "Libs: -L${pcfiledir} -lcmocka\n")
    return folder


def cross_file(name: str, target: Target) -> pathlib.Path:
    zig = f"'{sys.executable}', '-m', 'ziglang'"
    path = WORK / f"{name}.ini"
    path.write_text(f"""[binaries]
c = [{zig}, 'cc', '-target', '{target.triple}']
ar = [{zig}, 'ar']
dlltool = [{zig}, 'dlltool']
pkg-config = 'pkg-config'
[properties]
pkg_config_libdir = '{WORK}/cmocka'
[host_machine]
system = '{target.system}'
cpu_family = '{target.processor}'
cpu = '{target.processor}'
endian = 'little'
""")
    return path


def build(name: str, target: Target, headers: pathlib.Path) -> pathlib.Path:
    """The build folder with the extension, the tool, and the checks and tests where they can run."""
    folder = WORK / name
    tests = list(UNIT_TESTS) if target.runner == "wine" and shows_checks(target) else []
    if tests:
        make_cmocka(target)
    options = ["-Dpython=true", f"-Dpython_headers={headers}", "-Db_lundef=false", "-Dc_args=-g0", "-Dc_link_args=-s",
               f"-Dtests={'true' if shows_checks(target) else 'false'}", f"-Dcmocka={'enabled' if tests else 'disabled'}"]
    again = ["--reconfigure"] if (folder / "build.ninja").exists() else []
    run("meson", "setup", *again, folder, "--cross-file", cross_file(name, target), *options, cwd=ROOT)
    goals = [f"python/{target.module}", f"src/{target.library}", target.tool, *(f"tests/{test}.exe" for test in tests)]
    run("ninja", "-C", folder, *goals, *([f"tests/{target.checks}"] if shows_checks(target) else []))
    return folder


# ---- packing ----


def native_wheel() -> tuple[pathlib.Path, pathlib.Path]:
    """The wheel that pip builds here, unpacked, and its extension."""
    folder = WORK / "native"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
        "--config-settings=build-dir=build-wheels/native-build", "-w", folder, ".", cwd=ROOT)
    run(sys.executable, "-m", "wheel", "unpack", "--dest", folder, next(folder.glob("*.whl")))
    unpacked = next(path for path in folder.iterdir() if path.is_dir())
    return unpacked, unpacked / "flash_dmattn" / "_native.abi3.so"


def pack(name: str, target: Target, native: pathlib.Path, built: pathlib.Path) -> pathlib.Path:
    folder = WORK / f"{name}-wheel" / native.name
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(native, folder)
    (folder / "flash_dmattn" / "_native.abi3.so").unlink()
    shutil.copy(built / "python" / target.module, folder / "flash_dmattn")
    scripts = next(folder.glob("*.data")) / "scripts"
    (scripts / "fdm").unlink()
    shutil.copy(built / target.tool, scripts)
    info = next(folder.glob("*.dist-info")) / "WHEEL"
    lines = [line for line in info.read_text().splitlines() if not line.startswith("Tag:")]
    info.write_text("\n".join(lines + [f"Tag: cp310-abi3-{target.tag}"]) + "\n")
    DIST.mkdir(exist_ok=True)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", DIST, folder)
    return DIST / f"{native.name}-cp310-abi3-{target.tag}.whl"


PKG_CONFIG = """prefix=${pcfiledir}/../..
includedir=${prefix}/include
libdir=${prefix}/lib

Name: flash-dmattn
Description: Exact attention with any mask, forward and backward
Version: @VERSION@
Libs: -L${libdir} -lflash_dmattn
Cflags: -I${includedir}
"""


def write_cmake(folder: pathlib.Path, target: Target) -> None:
    """The files of CMake's package, by the templates that Meson uses."""
    place = folder / "lib" / "cmake" / "flash_dmattn"
    place.mkdir(parents=True)
    library = f"bin/{target.library}" if target.system == "windows" else f"lib/{target.links[-1]}"
    facts = {"VERSION": VERSION, "UP_TO_PREFIX": "../../..", "INCLUDEDIR": "include", "LIBRARY": library,
             "IMPORT_LIBRARY": "lib/libflash_dmattn.dll.a"}
    for template in (ROOT / "src" / "cmake").glob("*.in"):
        text = re.sub(r"@(\w+)@", lambda match: facts[match[1]], template.read_text())
        (place / template.stem).write_text(text)


def pack_c(name: str, target: Target, built: pathlib.Path) -> pathlib.Path:
    """An archive with header, library, tool, examples and the files of pkg-config and CMake, to be unpacked anywhere."""
    folder = WORK / f"{name}-c" / f"flash-dmattn-{VERSION}-{name}"
    shutil.rmtree(folder.parent, ignore_errors=True)
    for part in ("include", "lib/pkgconfig", "bin", "examples"):
        (folder / part).mkdir(parents=True)
    shutil.copy(ROOT / "include" / "flash_dmattn.h", folder / "include")
    shutil.copy(ROOT / "LICENSE", folder)
    for file in (*(ROOT / "examples").glob("*.c"), ROOT / "examples" / "CMakeLists.txt"):
        shutil.copy(file, folder / "examples")
    write_cmake(folder, target)
    shutil.copy(built / "src" / target.library, folder / ("bin" if target.system == "windows" else "lib"))
    if target.system == "windows":
        shutil.copy(built / "src" / "libflash_dmattn.dll.a", folder / "lib")
    for link in target.links:
        (folder / "lib" / link).symlink_to(target.library)
    shutil.copy(built / target.tool, folder / "bin")
    (folder / "lib" / "pkgconfig" / "flash_dmattn.pc").write_text(PKG_CONFIG.replace("@VERSION@", VERSION))
    archive = DIST / f"{folder.name}.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(folder, folder.name)
    return archive


def run_by_cmake(folder: pathlib.Path) -> None:
    """Configures, builds and runs the unpacked examples by this machine's CMake and compiler."""
    run("cmake", "-S", folder / "examples", "-B", folder / "built", f"-DCMAKE_PREFIX_PATH={folder}")
    run("cmake", "--build", folder / "built")
    for example in EXAMPLES:
        run(folder / "built" / example, env=os.environ | {"LD_LIBRARY_PATH": str(folder / "lib")})


def run_examples(name: str, target: Target, archive: pathlib.Path) -> str:
    """Compiles the archive's own examples with what is unpacked beside them, and runs them where this machine can."""
    with tarfile.open(archive) as tar:
        unpack(tar, WORK / f"{name}-c" / "unpacked")
    folder = next((WORK / f"{name}-c" / "unpacked").iterdir())
    windows, words = target.system == "windows", runner_of(target)
    library = [folder / "lib" / "libflash_dmattn.dll.a"] if windows else ["-L", folder / "lib", "-lflash_dmattn", "-lm"]
    runs = words is not None and "musl" not in target.triple  # musl's loader is not here
    for example in EXAMPLES:
        program = folder / "bin" / (f"{example}.exe" if windows else example)
        run(sys.executable, "-m", "ziglang", "cc", "-target", target.triple, folder / "examples" / f"{example}.c", "-I",
            folder / "include", *library, "-o", program)
        if runs:  # an example compares its result itself
            libraries = str(folder / "lib")
            place = {"QEMU_SET_ENV": f"LD_LIBRARY_PATH={libraries}"} if words else {"LD_LIBRARY_PATH": libraries}
            run(*words, program, env=os.environ | place)
    if name != "manylinux-x86_64":
        return f"examples compiled{' and run' if runs else ''}"
    if shutil.which("cmake") is None:
        return "examples compiled and run; the package file for CMake was not tried, CMake is not here"
    run_by_cmake(folder)
    return "examples compiled and run, and again by CMake"


# ---- checking ----


def needs_of(binary: pathlib.Path) -> tuple[set[str], set[tuple[int, ...]]]:
    """The libraries that a binary needs, and the versions of glibc's symbols."""
    parsed = lief.parse(str(binary))
    if isinstance(parsed, lief.PE.Binary):
        return {entry.name.lower() for entry in parsed.imports}, set()
    if isinstance(parsed, lief.MachO.Binary):
        own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
        return {library.name for library in parsed.libraries if library.command != own}, set()
    versions = {aux.name for need in parsed.symbols_version_requirement for aux in need.get_auxiliary_symbols()}
    numbers = {tuple(int(n) for n in v.removeprefix("GLIBC_").split(".")) for v in versions if v.startswith("GLIBC_")}
    return set(parsed.libraries), numbers


def is_allowed(library: str, target: Target) -> bool:
    if target.system == "windows" and library.startswith("api-ms-win-crt-"):
        return True
    return library in target.libraries or library.startswith("ld-linux-")


def check(wheel: pathlib.Path, target: Target, built: pathlib.Path) -> None:
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"wheels: {wheel.name} has {size} bytes; {MOST_BYTES} are allowed")
    for binary in [built / "python" / target.module, built / target.tool]:
        libraries, versions = needs_of(binary)
        foreign = sorted(library for library in libraries if not is_allowed(library, target))
        if foreign:
            sys.exit(f"wheels: {binary.name} of {wheel.name} needs {', '.join(foreign)}")
        newer = sorted(v for v in versions if v > target.glibc)
        if newer:
            sys.exit(f"wheels: {binary.name} of {wheel.name} needs glibc {'.'.join(map(str, newer[-1]))}")


# ---- running ----


def shows_checks(target: Target) -> bool:
    """Whether fdm-checks is built and run for it."""
    return target.runner == "-" or shutil.which(target.runner) is not None


def runner_of(target: Target) -> list[str] | None:
    """The words before a program of the target; None: it cannot run here."""
    if not shows_checks(target):
        return None
    words = [] if target.runner == "-" else [target.runner]
    if target.runner.startswith("qemu") and "gnu" in target.triple:
        words += ["-L", f"/usr/{target.processor}-linux-gnu"]
    return words


def run_checks(target: Target, built: pathlib.Path) -> str:
    words = runner_of(target)
    told = run(*words, built / "tests" / target.checks, "attention", "--repeat", RANDOM_PROBLEMS, "--kernel", "cpu.")
    return f"{told.splitlines()[-1]} (fdm-checks on the CPU{f', by {words[0]}' if words else ''})"


def nvrtc_for_windows() -> pathlib.Path:
    """The site-packages folder of a virtual environment with NVRTC's package for Windows."""
    site = WORK / "nvrtc-windows" / "Lib" / "site-packages"
    if not (site / "nvidia").exists():
        run(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target", site,
            "--only-binary=:all:", "--platform", "win_amd64", "nvidia-cuda-nvrtc>=13,<14")
    return site


def run_wine(built: pathlib.Path) -> list[str]:
    """The tool of the archive as it was unpacked, and UNIT_TESTS."""
    tool = next((WORK / "windows-x86_64-c" / "unpacked").glob("*/bin/fdm.exe"))
    told = run(sys.executable, "-m", "pytest", "-q", "-rs", ROOT / "tests" / "windows", cwd=WORK,
               env=os.environ | {"FDM_TOOL": str(tool), "FDM_NVRTC": str(nvrtc_for_windows())})
    for test in UNIT_TESTS:
        run("wine", built / "tests" / f"{test}.exe")
    return [f"{told.strip().splitlines()[-1]} (tests/windows)", f"{', '.join(UNIT_TESTS)} passed"]


def run_python(wheel: pathlib.Path) -> list[str]:
    """Installs the wheel where there is no compiler and no torch, and runs tests/wheel; then tests/python with the
    project's own environment, where that has torch."""
    place = WORK / "fresh"
    shutil.rmtree(place, ignore_errors=True)
    run(sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    alone = {"PATH": f"{place}/bin"}
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "numpy", "pytest", wheel,
        env=os.environ | alone | {"CC": "false"})
    told = [run(python, "-m", "pytest", "-q", ROOT / "tests" / "wheel", cwd=WORK, env=alone)]
    own = ROOT / ".venv" / "bin" / "python"
    if own.exists() and subprocess.run([own, "-c", "import torch, pytest"], capture_output=True).returncode == 0:
        files = [ROOT / "tests" / "python" / f"test_{name}.py" for name in ("forward", "gradients", "masks", "operators")]
        site = next((place / "lib").glob("python3.*")) / "site-packages"
        shutil.copytree(site / "flash_dmattn", WORK / "with-torch" / "flash_dmattn", dirs_exist_ok=True)
        told.append(run(own, "-m", "pytest", "-q", *files, cwd=WORK, env=os.environ | {"PYTHONPATH": f"{WORK}/with-torch"}))
    return [f"{text.strip().splitlines()[-1]} ({where})" for text, where in
            zip(told, ("tests/wheel without torch", "a part of tests/python with torch"))]


def make_arm64_python() -> pathlib.Path:
    """The root folder of Debian's Python for AArch64, unpacked; nothing of it is installed."""
    folder = WORK / "python-aarch64"
    root = folder / "root"
    if not (root / "usr" / "bin" / "python3").exists():
        own = ("APT::Architecture=arm64", "APT::Architectures=arm64", f"Dir::State::status={folder}/status",
               f"Dir::Cache={folder}/cache")
        apt = own_apt(folder, "deb", *(word for option in own for word in ("-o", option)))
        run(*apt, "install", "--download-only", "--yes", "--no-install-recommends", "python3", "libstdc++6")
        for package in (folder / "cache" / "archives").glob("*.deb"):
            run("dpkg-deb", "-x", package, root)
    return root


def run_arm64_python(wheel: pathlib.Path, tool: pathlib.Path) -> str:
    """Runs tests/wheel by Debian's Python for AArch64 under QEMU, with the wheel and PyPI's NumPy for it."""
    root, site, wrapper = make_arm64_python(), WORK / "python-aarch64" / "site", WORK / "python-aarch64" / "python"
    version = (root / "usr" / "bin" / "python3").readlink().name.removeprefix("python")
    shutil.rmtree(site, ignore_errors=True)
    of = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (17, 27, 28)]
    run(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", site, *of,
        "--only-binary=:all:", "--python-version", version, "numpy", "pytest", wheel)
    # Programs that the tests start are these scripts: only QEMU can start a program of AArch64.
    for script, program in ((wrapper, root / "usr" / "bin" / "python3"), (wrapper.with_name("fdm"), tool)):
        script.write_text(f'#!/bin/sh\nexec qemu-aarch64 -L "{root}" -E PYTHONPATH="{site}" "{program}" "$@"\n')
        script.chmod(0o755)
    told = run(wrapper, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests" / "wheel", cwd=WORK,
               env=os.environ | {"FDM_PYTHON": str(wrapper), "FDM_TOOL": str(wrapper.with_name("fdm"))})
    return f"{told.strip().splitlines()[-1]} (tests/wheel under QEMU, Python {version} and NumPy of AArch64)"


# ---- compiled kernels ----

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")


def make_kernels(arch: str, fdm: pathlib.Path) -> str:
    """A wheel with nothing but the compiled kernels of the common set for one architecture, which the library finds."""
    version = run(fdm, "--version").split()[-1]
    name = f"flash_dmattn_kernels_{arch.replace('_', '')}"
    folder, cache = WORK / name, WORK / f"{name}-cache"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(cache, ignore_errors=True)
    archive, info = folder / "flash_dmattn" / f"kernels-{arch}.fdm", folder / f"{name}-{version}.dist-info"
    archive.parent.mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\nLicense: BSD-3-Clause\n"
        f"Summary: Compiled kernels of flash-dmattn for {arch}\nRequires-Dist: flash-dmattn=={version}\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: flash-dmattn\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
    place = os.environ | {"VIRTUAL_ENV": str(WORK / "venv"), "FLASH_DMATTN_CACHE_DIR": str(cache)}
    start = time.monotonic()
    run(fdm, "cache", "build", "--device", arch, "--set", "common", env=place)
    seconds = time.monotonic() - start
    told = run(fdm, "cache", "pack", archive, env=place)
    archive.chmod(0o644)
    DIST.mkdir(exist_ok=True)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", DIST, folder)
    wheel = DIST / f"{name}-{version}-py3-none-any.whl"
    without = {"PATH": "/usr/bin:/bin", "FLASH_DMATTN_KERNEL_ARCHIVE": str(archive), "FLASH_DMATTN_CACHE_DIR": "/dev/null/no"}
    run(fdm, "plan", "--device", arch, "--head-dim", "128", "--dtype", "bf16", "--causal", "--heads", "32", "--heads-kv", "8",
        "--seqlen-q", "2048", "--resources", env=without)
    return (f"{wheel.name}: {told.split(': ')[-1].split(',')[0]}, {wheel.stat().st_size / 1e6:.2f} MB, compiled in "
            f"{seconds:.0f} s; read without NVRTC")


def make_sdist() -> str:
    """An archive of the sources of the last commit, and a wheel built from it without an index."""
    code = f"import mesonpy; print(mesonpy.build_sdist({str(DIST)!r}))"
    DIST.mkdir(exist_ok=True)
    archive = DIST / run(sys.executable, "-c", code, cwd=ROOT).strip().splitlines()[-1]
    run(sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-index", "--no-deps",
        "--no-build-isolation", "-w", WORK / "from-sdist", archive)
    return f"sdist: {archive.name}, {archive.stat().st_size / 1e6:.2f} MB; a wheel was built from it offline"


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds and checks wheels for other systems.")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--list", action="store_true", help="names the targets")
    given = parser.parse_args()
    kernels = [f"kernels-{arch}" for arch in ARCHES]
    unknown = [name for name in given.targets if name not in {*TARGETS, *kernels, "sdist"}]
    if unknown:
        parser.error(f"{unknown[0]} is no target; targets are {', '.join([*TARGETS, 'sdist', *kernels])}")
    if given.list:
        print("\n".join(f"{name:20} {target.tag}" for name, target in TARGETS.items()))
        print("\n".join(["sdist", *kernels]))
        return
    if not given.targets or "sdist" in given.targets:
        print(make_sdist(), flush=True)
    names = [name for name in given.targets or TARGETS if name in TARGETS]
    wanted = [arch for arch in ARCHES if f"kernels-{arch}" in (given.targets or kernels)]
    if not names and not wanted:
        return
    os.environ["WINEDEBUG"] = "-all,err+msvcrt"  # what its C library refuses, among what a program prints, and no more
    native, extension = native_wheel()
    headers = make_headers(extension)
    for name in names:
        start, target = time.monotonic(), TARGETS[name]
        built = build(name, target, headers)
        wheel = pack(name, target, native, built)
        check(wheel, target, built)
        archive = pack_c(name, target, built)
        ran = [run_checks(target, built)] if shows_checks(target) else []
        examples = run_examples(name, target, archive)
        if name == "manylinux-x86_64":
            ran += run_python(wheel)
        if name == "manylinux-aarch64" and shows_checks(target):
            ran.append(run_arm64_python(wheel, built / target.tool))
        if target.runner == "wine" and shows_checks(target):
            ran += run_wine(built)
        print(f"{name}: {wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB, {time.monotonic() - start:.0f} s; "
              f"{'; '.join(ran) or 'built, never run'}\n    {archive.name}, {archive.stat().st_size / 1e6:.2f} MB; {examples}",
              flush=True)
    for arch in wanted:
        print(make_kernels(arch, next(native.glob("*.data")) / "scripts" / "fdm"), flush=True)


if __name__ == "__main__":
    main()
