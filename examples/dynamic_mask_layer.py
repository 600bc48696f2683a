"""dynamic_mask_layer.py: an attention layer with a dynamic mask, in training and in generation; and a check that both agree.

Usage: dynamic_mask_layer.py [--seq 96] [--window 16] [--device cpu]
"""

from __future__ import annotations

import argparse

import torch
from flash_dmattn import flash_dmattn_func, masks
from torch import Tensor, nn


class DynamicMaskAttention(nn.Module):
    """Each row attends to the `window` keys of its prefix whose bias is largest; the bias is learned from the values."""

    def __init__(self, width: int, heads: int, heads_kv: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.head_dim, self.window = heads, heads_kv, head_dim, window
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, heads_kv * head_dim, bias=False)
        self.v_proj = nn.Linear(width, heads_kv * head_dim, bias=False)
        self.dt_proj = nn.Linear(heads_kv * head_dim, heads_kv, bias=False)  # values -> one number a key and KV head
        self.A = nn.Parameter(torch.ones(heads_kv))
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, S, H, D], k and v [B, S, Hkv, D], bias [B, Hkv, S]."""
        batch, seqlen, _ = x.shape
        q = self.q_proj(x).view(batch, seqlen, self.heads, self.head_dim)
        k = self.k_proj(x).view(batch, seqlen, self.heads_kv, self.head_dim)
        v = self.v_proj(x)
        bias = masks.key_bias(self.dt_proj(v), self.A)  # A softplus(dt)
        return q, k, v.view(batch, seqlen, self.heads_kv, self.head_dim), bias

    def forward(self, x: Tensor) -> Tensor:
        """All rows at once: training, and the prompt."""
        q, k, v, bias = self.project(x)
        intervals = masks.topk_intervals(bias, self.window)  # no gradient through the choice
        out = flash_dmattn_func(q, k, v, attn_bias=bias[:, :, None], is_causal=True, key_intervals=intervals)
        y: Tensor = self.o_proj(out.flatten(2))
        return y

    @torch.no_grad()
    def prompt(self, x: Tensor) -> tuple[Tensor, masks.TopKState]:
        """The prompt's output, and the state that generation goes on from."""
        _, k, v, bias = self.project(x)
        return self(x), masks.TopKState.of_prompt(bias, self.window, k, v)

    @torch.no_grad()
    def step(self, x: Tensor, state: masks.TopKState) -> Tensor:
        """One more token, x [B, 1, width]: reads `window` keys, however long the sequence is."""
        q, k, v, bias = self.project(x)
        state.append(bias[..., 0], k, v)
        out = flash_dmattn_func(q, state.k, state.v, attn_bias=state.bias)
        y: Tensor = self.o_proj(out.flatten(2))
        return y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq", type=int, default=96)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layer = DynamicMaskAttention(64, 4, 2, 16, arguments.window).to(arguments.device)
    x = torch.randn(2, arguments.seq, 64, device=arguments.device)

    whole = layer(x)
    whole.square().mean().backward()
    gradient = layer.dt_proj.weight.grad
    assert gradient is not None
    print(f"gradient of dt_proj: {gradient.norm():.6f}")

    half = arguments.seq // 2
    _, state = layer.prompt(x[:, :half])
    rows = [layer.step(x[:, t : t + 1], state) for t in range(half, arguments.seq)]
    error = (torch.cat(rows, 1) - whole[:, half:]).abs().max()
    print(f"largest difference of {len(rows)} generated rows from the whole: {error:.2e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
