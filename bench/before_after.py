"""Builds of the library on the same CUDA tensors, sample by sample in turn: what a change costs.

    python3 bench/before_after.py BEFORE.so AFTER.so[=KERNEL] ... [--masks] [--forward | --backward] [--rounds N]
                                  [--cases TEXT] [--share K/N] [--json FILE]
    python3 bench/before_after.py LIBRARY.so --sinks [...]

Needs PyTorch. A sample is the time of `CALLS` calls on the device. The builds alternate from sample to sample, so that
the clock of the card is the same for all. Ratios are times of the first build over those of the others. Each build has
the structs that begin with struct_bytes. KERNEL is a kernel's or a choice's name, else the plan chooses. With --sinks
there is one build, and its calls without learnable sinks are timed beside the same calls with them.
"""

import argparse
import ctypes
import json
import statistics
import subprocess

import torch

CALLS = 4
CODES = {
    torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.bool: (6, 8), torch.int32: (0, 32),
}  # fmt: skip
NAMES = (
    "q k v mask bias interval_start interval_end cu_seqlens_q cu_seqlens_k out lse dout dlse dq dk dv dbias lse_low "
    "sink dsink"
).split()
FDM_CUDA = 2


class Tensor(ctypes.Structure):
    """fdm_tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("type", ctypes.c_int32), ("index", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Tensors(ctypes.Structure):
    """fdm_tensors."""

    _fields_ = [("struct_bytes", ctypes.c_uint32)] + [(name, ctypes.POINTER(Tensor)) for name in NAMES]


class Options(ctypes.Structure):
    """fdm_options."""

    _fields_ = [
        ("struct_bytes", ctypes.c_uint32), ("has_softmax_scale", ctypes.c_int32), ("causal", ctypes.c_int32),
        ("deterministic", ctypes.c_int32), ("softmax_scale", ctypes.c_double), ("softcap", ctypes.c_double),
        ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64), ("num_threads", ctypes.c_int32), ("kernel", ctypes.c_char_p), ("family", ctypes.c_char_p),
        ("executor", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("lse_without_sink", ctypes.c_int64),
    ]  # fmt: skip


ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Allocator(ctypes.Structure):
    """fdm_allocator."""

    _fields_ = [("context", ctypes.c_void_p), ("allocate", ALLOCATE), ("release", RELEASE)]


class Library:
    """One build."""

    def __init__(self, path):
        path, _, self.kernel = path.partition("=")
        self.c = ctypes.CDLL(path, mode=getattr(ctypes, "RTLD_LOCAL", 0))
        self.c.fdm_last_error.restype = ctypes.c_char_p
        self.memory = None
        self.allocator = Allocator(None, ALLOCATE(self._allocate), RELEASE(lambda context, memory: None))

    def _allocate(self, _, size):
        if self.memory is None or self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self.memory.data_ptr()

    def call(self, backward, tensors, options):
        function = self.c.fdm_attention_backward if backward else self.c.fdm_attention_forward
        if function(ctypes.byref(tensors), ctypes.byref(options), ctypes.byref(self.allocator)):
            raise RuntimeError(self.c.fdm_last_error().decode())


def describe(tensor, kept):
    shape = (ctypes.c_int64 * tensor.ndim)(*tensor.shape)
    strides = (ctypes.c_int64 * tensor.ndim)(*tensor.stride())
    code, bits = CODES[tensor.dtype]
    described = Tensor(tensor.data_ptr(), FDM_CUDA, 0, tensor.ndim, code, bits, 1, shape, strides, 0)
    kept += [tensor, shape, strides, described]
    return ctypes.pointer(described)


def cases():
    """Name, shape (B, H, Hkv, Sq, Sk, D), dtype, options, what hides keys."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for D, H in ((64, 32), (128, 16), (256, 8)):
        yield f"full D{D}", (4, H, H, 4096, 4096, D), bf16, {}, ""
        yield f"causal D{D}", (4, H, H, 4096, 4096, D), bf16, {"causal": 1}, ""
        yield f"window 1024 D{D}", (4, H, H, 4096, 4096, D), bf16, {"causal": 1, "window_left": 1024}, ""
        yield f"padding D{D}", (4, H, H, 4096, 4096, D), bf16, {}, "padding"
        yield f"documents as intervals D{D}", (2, H, H, 4096, 4096, D), bf16, {"causal": 1}, "intervals"
        yield f"dense mask D{D}", (2, H, H, 2048, 2048, D), bf16, {}, "mask"
        yield f"dense bias D{D}", (2, H, H, 2048, 2048, D), bf16, {}, "bias"
        yield f"packed causal D{D}", (8, H, H, 1024, 1024, D), bf16, {"causal": 1}, "packed"
    for S in (512, 1024, 2048):
        for D, H in ((64, 32), (128, 16), (256, 8)):
            yield f"short causal S{S} D{D}", (16384 // S, H, H, S, S, D), bf16, {"causal": 1}, ""
    for D in (64, 128, 256):
        for hides in ("", "padding", "mask", "bias"):
            options = {"family": b"mma", "causal": 1}
            yield f"mma {hides or 'causal'} D{D}", (2, 16, 16, 2048, 2048, D), bf16, options, hides
    for D in (64, 128):
        for hides in ("", "padding", "mask", "bias"):
            yield f"float32 {hides or 'causal'} D{D}", (2, 8, 8, 2048, 2048, D), fp32, {"causal": 1}, hides
    yield "decode D128", (16, 32, 8, 1, 16384, 128), bf16, {}, ""
    yield "decode padding D128", (16, 32, 8, 1, 16384, 128), bf16, {}, "padding"
    yield "wide D512 padding", (1, 8, 8, 2048, 2048, 512), bf16, {}, "padding"


def mask_cases():
    """The same of masks that key intervals say: runs of keys beside scattered ones, and causal alone; padding."""
    bf16 = torch.bfloat16
    for S in (8192, 32768):
        for D, H, K in ((64, 32, 32), (128, 16, 16), (128, 32, 4), (256, 8, 8)):
            name, shape = f"S{S} D{D} H{H}/{K}", (1, H, K, S, S, D)
            yield f"causal {name}", shape, bf16, {"causal": 1}, ""
            yield f"documents causal {name}", shape, bf16, {"causal": 1}, "documents"
            yield f"documents {name}", shape, bf16, {}, "documents"
            yield f"prefix {name}", shape, bf16, {}, "prefix"
            yield f"top-W {name}", shape, bf16, {"causal": 1}, "top-W"
    for S in (1024, 2048):
        for D, H in ((128, 16), (256, 8)):
            yield f"documents causal S{S} D{D} H{H}", (1, H, H, S, S, D), bf16, {"causal": 1}, "documents"
            yield f"top-W S{S} D{D} H{H}", (1, H, H, S, S, D), bf16, {"causal": 1}, "top-W"
    for D, H in ((64, 32), (128, 16), (256, 8)):
        yield f"padding B4 S4096 D{D}", (4, H, H, 4096, 4096, D), bf16, {}, "padding"
        yield f"documents of 512 B2 S4096 D{D}", (2, H, H, 4096, 4096, D), bf16, {"causal": 1}, "intervals"


def sink_cases():
    """Shapes of gpt-oss, and others; decoding too."""
    bf16 = torch.bfloat16
    for S in (1024, 4096, 16384):
        yield f"gpt-oss causal S{S}", (1, 64, 8, S, S, 64), bf16, {"causal": 1}, ""
        yield f"gpt-oss window 128 S{S}", (1, 64, 8, S, S, 64), bf16, {"causal": 1, "window_left": 127}, ""
    for D, H in ((64, 32), (128, 16), (256, 8)):
        yield f"full D{D}", (4, H, H, 4096, 4096, D), bf16, {}, ""
        yield f"causal D{D}", (1, H, H, 16384, 16384, D), bf16, {"causal": 1}, ""
        yield f"mma causal D{D}", (2, 16, 16, 2048, 2048, D), bf16, {"family": b"mma", "causal": 1}, ""
    yield "float32 causal D64", (2, 8, 8, 2048, 2048, 64), torch.float32, {"causal": 1}, ""
    for B, S in ((1, 8192), (16, 8192), (64, 2048)):
        yield f"decode gpt-oss B{B} S{S}", (B, 64, 8, 1, S, 64), bf16, {}, ""


def intervals_of(hides, S):
    """The rows that see each key: of 12 random documents, of a prefix of 2048 keys, of the keys' random ranks."""
    generator, keys = torch.Generator().manual_seed(3), torch.arange(S)
    if hides == "documents":
        cuts = torch.sort(torch.randperm(S - 1, generator=generator)[:11] + 1).values
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), cuts, torch.full((1,), S)])
        document = torch.searchsorted(bounds, keys, right=True) - 1
        return bounds[document], bounds[document + 1]
    if hides == "prefix":
        return torch.where(keys < 2048, torch.zeros_like(keys), keys), torch.full_like(keys, 2**31 - 1)
    if hides == "top-W":  # a key of rank r of 1 is among the W best of W / (1 - r) keys
        W = 2048 if S > 8192 else S // 8
        ends = (W / (1 - torch.rand(S, generator=generator))).clamp(max=2e9).long()
        return keys, torch.where(ends > keys, ends, torch.zeros_like(ends))
    return keys, (keys // 512 + 1) * 512


def problem(shape, dtype, hides):
    B, H, Hkv, Sq, Sk, D = shape
    torch.manual_seed(1)
    new = lambda *size, kind=dtype: torch.randn(*size, dtype=kind, device="cuda")
    if hides == "packed":
        lengths = torch.randint(Sk // 2, Sk + 1, (B,))
        cu = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32, device="cuda")
        total = int(lengths.sum())
        t = {"q": new(total, H, D), "k": new(total, Hkv, D), "v": new(total, Hkv, D), "out": new(total, H, D)}
        t |= {"lse": new(H, total, kind=torch.float32), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    else:
        t = {"q": new(B, Sq, H, D), "k": new(B, Sk, Hkv, D), "v": new(B, Sk, Hkv, D), "out": new(B, Sq, H, D)}
        t["lse"] = new(B, H, Sq, kind=torch.float32)
    keys = torch.arange(Sk, device="cuda")
    if hides == "padding":
        lengths = Sk - torch.arange(B, device="cuda") * Sk // (2 * B)
        t["mask"] = (keys < lengths[:, None])[:, None, None]
    if hides == "mask":
        t["mask"] = torch.rand(B, 1, Sq, Sk, device="cuda") < 0.7
    if hides == "bias":
        t["bias"] = new(B, 1, Sq, Sk)
    if hides in ("intervals", "documents", "prefix", "top-W"):
        for name, of_keys in zip(("interval_start", "interval_end"), intervals_of(hides, Sk)):
            t[name] = of_keys.to(torch.int32).cuda().expand(B, 1, Sk).contiguous()
    return t


def measure(libraries, name, shape, dtype, options, hides, rounds, passes, sinks):
    t = problem(shape, dtype, hides)
    sink = torch.randn(shape[1], dtype=dtype, device="cuda")
    for backward in passes:
        if backward:
            if shape[3] == 1 or shape[5] > 256:
                continue
            t["dout"] = torch.randn_like(t["out"])
            t |= {"d" + each: torch.empty_like(t[each]) for each in ("q", "k", "v")}
        kept = []
        described = {each: describe(tensor, kept) for each, tensor in t.items()}
        tensors = [Tensors(ctypes.sizeof(Tensors), **described) for _ in libraries]
        if sinks:
            tensors[1].sink = describe(sink, kept)
            if backward:
                tensors[1].dsink = describe(torch.empty_like(sink), kept)
        every = []
        for library in libraries:
            o = Options(ctypes.sizeof(Options), window_left=-1, window_right=-1)
            for key, value in options.items():
                setattr(o, key, value)
            if hides == "packed":
                o.max_seqlen_q = o.max_seqlen_k = shape[4]
            o.kernel = library.kernel.encode() or None
            o.stream = torch.cuda.current_stream().cuda_stream
            every.append(o)
        samples = [[] for _ in libraries]
        for n in range(rounds + 2):
            order = range(len(libraries)) if n % 2 else reversed(range(len(libraries)))
            for i in order:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                torch.cuda.synchronize()
                torch.cuda._sleep(200000)  # so that the calls are queued before the first begins
                events[0].record()
                for _ in range(CALLS):
                    libraries[i].call(backward, tensors[i], every[i])
                events[1].record()
                torch.cuda.synchronize()
                if n >= 2:
                    samples[i].append(events[0].elapsed_time(events[1]) / CALLS)
        medians = [statistics.median(each) for each in samples]
        ratios = " ".join(f"{medians[0] / each:.3f}" for each in medians[1:])
        print(f"{name:32} {'backward' if backward else 'forward':8} {medians[0]:9.4f} ms  {ratios}", flush=True)
        yield {"case": name, "pass": "backward" if backward else "forward", "shape": shape, "dtype": str(dtype)[6:],
               "hides": hides, "ms": samples}


def card():
    """The card, its driver, clocks and power now."""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw"
    return subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("libraries", nargs="+", metavar="LIBRARY.so[=KERNEL]",
                        help="the others are compared with the first")
    parser.add_argument("--masks", action="store_true", help="masks that key intervals say, in the place of the rest")
    parser.add_argument("--sinks", action="store_true", help="what learnable sinks cost, in the place of the rest")
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument("--forward", action="store_true", help="no backward")
    passes.add_argument("--backward", action="store_true", help="no forward")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default="", help="those whose name holds one of these texts, comma separated")
    parser.add_argument("--share", default="0/1", help="K/N: every N-th case from the K-th on, to compile side by side")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    if chosen.sinks:
        chosen.libraries = [chosen.libraries[0]] * 2
    libraries = [Library(path) for path in chosen.libraries]
    listed = sink_cases() if chosen.sinks else mask_cases() if chosen.masks else cases()
    results, failed, clocks = [], [], [card()]
    passes = range(int(chosen.backward), 2 - int(chosen.forward))
    first, step = map(int, chosen.share.split("/"))
    for case in list(listed)[first::step]:
        if any(part in case[0] for part in chosen.cases.split(",")):
            try:
                results += measure(libraries, *case, chosen.rounds, passes, chosen.sinks)
            except RuntimeError as error:
                failed.append(f"{case[0]}: {error}")
                print(failed[-1], flush=True)
    clocks.append(card())
    for n, path in enumerate(chosen.libraries[1:], 1):
        gains = [statistics.median(r["ms"][0]) / statistics.median(r["ms"][n]) for r in results]
        mean, least, most = statistics.geometric_mean(gains), min(gains), max(gains)
        print(f"{path}: mean {mean:.4f}, least {least:.3f}, most {most:.3f} of {len(gains)}")
    print(*clocks, sep="\n")
    if chosen.json:
        origin = {"device": clocks, "torch": torch.__version__, "libraries": chosen.libraries}
        with open(chosen.json, "w") as file:
            json.dump(origin | {"results": results, "failed": failed}, file, indent=1)


if __name__ == "__main__":
    main()
