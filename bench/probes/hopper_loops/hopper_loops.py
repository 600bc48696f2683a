#!/usr/bin/env python3
"""Runs a bare loop and prints the clocks of a step: hopper_loops.py [--steps N] [--json FILE] LOOP...

Each cubin lies in --cubins, where hopper_loops.sh puts it. --emulate compiles the loop's text by the stand-in of NVRTC
and runs few steps of a cluster on the emulated device of tests/emulator, which reports deadlocks and races.
"""

import argparse
import array
import ctypes
import json
import pathlib
import statistics
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "src"
PEAK = 4096  # dense bf16 FLOP per clock and multiprocessor
TOKENS = 16384
PANEL = 8192

# file, threads, blocks of a cluster, D, Dv, shared bytes, FLOP a step and block, floor of shared memory in clocks,
# prediction, limit
LOOPS = {}
SHARED = 229376 + 1024 + 256
for names, facts in (
    ("pair_256 pair_256_parts pair_256_no_additions pair_256_no_dq",
     ("pair", 512, 2, 256, 256, 222208 + 1024 + 256, 5 * 2 * 64 * 64 * 256, 3392, "3900-4400", 4100)),
    ("pair_192_128 pair_192_128_no_additions",
     ("pair", 512, 2, 192, 128, SHARED, 2 * 64 * 64 * (3 * 192 + 2 * 128), 2240, "2580-2900", 2700)),
    ("order4_plain order4_late order4_late_skewed order4_late_turns order4_late_skewed_no_additions "
     "order4_early order4_early_skewed",
     ("order4", 384, 1, 128, 128, SHARED, 5 * 2 * 64 * 128 * 128, 3008, "3225-3400", 3400)),
    ("forward_512_ring8 forward_512_ring9",
     ("forward512", 384, 2, 512, 512, SHARED, 2 * 2 * 64 * 64 * 512, 2688, "2688-3000", 3150)),
    ("pair_128",
     ("pair128", 384, 2, 128, 128, SHARED, 5 * 2 * 64 * 128 * 128, 2880, "2950-3100", 3400)),
    ("roles_512",
     ("roles512", 384, 2, 512, 512, SHARED + 64, 2 * 2 * 64 * 64 * 512, 2820, "2820-3600", 3600)),
):
    LOOPS.update((name, facts) for name in names.split())


class Params(ctypes.Structure):
    """struct loop_params of loops.cuh."""

    _fields_ = [
        ("maps", c_uint64 * 32),
        ("time", c_uint64),
        ("out", c_uint64),
        ("dq", c_uint64),
        ("rows", c_uint64),
        ("scale", c_float),
        ("steps", c_int),
        ("heads", c_int),
        ("tokens", c_int),
        ("stagger", c_int),
        ("padding", c_int * 3),
    ]


class Cluster(ctypes.Structure):
    """A launch attribute that holds the extents of a cluster."""

    _fields_ = [("id", c_int), ("padding", c_int), ("value", c_uint * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", c_void_p), ("count", c_uint)]


class Driver:
    """The CUDA driver's functions by name; a result that is not 0 ends the program."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.functions = {}
        self("cuInit", c_uint(0))
        device, context = c_int(), c_void_p()
        self("cuDeviceGet", byref(device), c_int(0))
        self("cuDevicePrimaryCtxRetain", byref(context), device)
        self("cuCtxPushCurrent", context)

    def __call__(self, name, *arguments):
        if name not in self.functions:
            place = c_void_p()
            found = self.library.cuGetProcAddress_v2(name.encode(), byref(place), 12000, c_uint64(0), None)
            if found or not place.value:
                raise SystemExit(f"the CUDA driver has no {name}")
            self.functions[name] = ctypes.CFUNCTYPE(c_int)(place.value)
        result = self.functions[name](*arguments)
        if result:
            raise SystemExit(f"{name}: error {result}")

    def allocate(self, size, word=None):
        memory = c_uint64()
        self("cuMemAlloc", byref(memory), c_size_t(size))
        if word is None:
            self("cuMemsetD8", memory, ctypes.c_ubyte(0), c_size_t(size))
        return memory.value

    def upload(self, data):
        memory = self.allocate(len(data), 0)
        self("cuMemcpyHtoD", c_uint64(memory), data, c_size_t(len(data)))
        return memory

    def numbers(self, memory, count):
        data = (c_uint64 * count)()
        self("cuMemcpyDtoH", data, c_uint64(memory), c_size_t(8 * count))
        return list(data)


def gaussians(count):
    """bf16 of about N(0, 1), from a congruential generator."""
    table = array.array("H")
    inverse = [statistics.NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)]
    words = [array.array("I", array.array("f", [x]).tobytes())[0] + 0x8000 >> 16 for x in inverse]
    state = 1
    for _ in range(min(count, 1 << 18)):
        state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        table.append(words[state >> 52])
    while len(table) < count:
        table.extend(table[: count - len(table)])
    return table.tobytes()


def tensor_map(driver, memory, width, heads, tokens):
    raw = (ctypes.c_char * 256)()
    at = (ctypes.addressof(raw) + 63) // 64 * 64
    extents, strides = (c_uint64 * 3)(width, tokens, heads), (c_uint64 * 2)(2 * width, 2 * width * tokens)
    driver("cuTensorMapEncodeTiled", c_void_p(at), c_int(9), c_uint(3), c_void_p(memory), extents, strides,
           (c_uint * 3)(64, 32, 1), (c_uint * 3)(1, 1, 1), c_int(0), c_int(3), c_int(2), c_int(0))
    return ctypes.string_at(at, 128)


def emulated_code(name):
    """The loop's text, compiled by the stand-in of NVRTC."""
    nvrtc = ctypes.CDLL("libnvrtc.so.13")
    text = (HERE / f"{name}.cu").read_bytes()
    headers = {"loops.cuh": HERE / "loops.cuh", "cuda/tensor_map.h": SOURCES / "cuda/tensor_map.h"}
    headers |= {f"cuda/ptx/{path.name}": path for path in (SOURCES / "cuda/ptx").glob("*.cuh")
                if path.name not in ("tcgen05.cuh", "cluster_launch.cuh")}
    texts = [path.read_bytes() for path in headers.values()]
    program, size, title = c_void_p(), c_size_t(), f"{name}.cu".encode()
    strings = ctypes.c_char_p * len(texts)
    bodies, names = strings(*texts), strings(*[key.encode() for key in headers])
    nvrtc.nvrtcCreateProgram(byref(program), text, title, len(texts), bodies, names)
    failed = nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_90a"))
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode()[:6000])
    nvrtc.nvrtcGetCUBINSize(program, byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    return code.raw


def run(driver, options, name):
    file, threads, blocks, width, width_v, shared, flops, floor, prediction, limit = LOOPS[name]
    grid, tokens = (blocks, 256) if options.emulate else (132, TOKENS)
    code = emulated_code(file) if options.emulate else (options.cubins / f"{file}.cubin").read_bytes()
    module, function = c_void_p(), c_void_p()
    driver("cuModuleLoadData", byref(module), code)
    driver("cuModuleGetFunction", byref(function), module, name.encode())
    driver("cuFuncSetAttribute", function, c_int(8), c_int(shared))
    attribute = Cluster(4, 0, (c_uint * 16)(blocks, 1, 1))
    config = Config((c_uint * 3)(grid, 1, 1), (c_uint * 3)(threads, 1, 1), shared, None, ctypes.addressof(attribute), 1)
    most = 1 if options.emulate else 4
    values = gaussians(most * tokens * max(width, width_v))
    data = [driver.upload(values[: 2 * most * tokens * w]) for w in (width, width_v)]
    stats = driver.upload(array.array("f", [4.0] * tokens).tobytes())
    space = (ctypes.c_char * (2 * ctypes.sizeof(Params)))()
    params = Params.from_buffer(space, -ctypes.addressof(space) % 64)
    params.time, params.out = driver.allocate(8 * grid), driver.allocate(grid * 512 * 64 * 4)
    params.dq, params.rows = driver.allocate(most * tokens * width * 4), stats
    params.scale, params.tokens = 1.4426950408889634 / width**0.5, tokens
    results = []
    for heads, stagger in ((1, 0),) if options.emulate else ((1, 2), (4, 0), (4, 2)):
        params.heads, params.stagger, params.steps = heads, stagger, options.steps
        for i, (memory, w) in enumerate(zip(data, (width, width_v))):
            ctypes.memmove(ctypes.addressof(params) + 128 * i, tensor_map(driver, memory, w, heads, tokens), 128)
        arguments = (c_void_p * 1)(ctypes.addressof(params))
        events = [c_void_p(), c_void_p()]
        clocks, times = [], []
        for event in events:
            driver("cuEventCreate", byref(event), c_uint(0))
        for _ in range(1 if options.emulate else 7):
            milliseconds = c_float()
            driver("cuEventRecord", events[0], None)
            driver("cuLaunchKernelEx", byref(config), function, arguments, None)
            driver("cuEventRecord", events[1], None)
            driver("cuCtxSynchronize")
            driver("cuEventElapsedTime", byref(milliseconds), *events)
            each = driver.numbers(params.time, grid)
            clocks.append((statistics.median(each), max(each)))
            times.append(milliseconds.value)
        if options.emulate:
            print(f"{name}: {options.steps} steps ran on the emulated device")
            continue
        middle, slowest = (statistics.median(c[i] for c in clocks[2:]) / options.steps for i in (0, 1))
        rate = flops * grid * options.steps / statistics.median(times[2:]) / 1e9
        results.append(
            {
                "loop": name,
                "heads": heads,
                "stagger": stagger,
                "clocks": round(middle),
                "slowest": round(slowest),
                "floor": floor,
                "tensor": flops // PEAK,
                "prediction": prediction,
                "limit": limit,
                "of_peak": round(flops / PEAK / middle, 3),
                "tflops": round(rate, 1),
            }
        )
        print(f"{name:20} heads {heads} stagger {stagger}: {middle:6.0f} clk a step, slowest block {slowest:6.0f}; "
              f"tensor {flops // PEAK}, shared memory {floor}, predicted {prediction}, limit {limit}; "
              f"{100 * flops / PEAK / middle:4.1f} % of peak, {rate:5.0f} TFLOPS", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="+", choices=list(LOOPS), metavar="LOOP", help=" ".join(LOOPS))
    parser.add_argument("--steps", type=int, default=2048, help="an even number")
    parser.add_argument("--cubins", type=pathlib.Path, default=HERE)
    parser.add_argument("--json", type=pathlib.Path, help="adds a line for each result to this file")
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    driver = Driver()
    for name in options.loops:
        for result in run(driver, options, name):
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
