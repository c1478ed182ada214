"""Trains demo-chat with PyTorch, on a CUDA GPU if there is one. PyTorch is not a dependency.

On a CPU this is three times as fast as MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from demo_chat.batches import Batch
from demo_chat.training import BETAS, CLIP, DECAY, Plan, Watch
from demo_chat.weights import PREFIX, Shape, Weights

HALF = torch.bfloat16  # the type of matrix products; weights and sums are float32


def train(
    weights: Weights, shape: Shape, plan: Plan, batches: Iterator[Batch], watch: Watch
) -> Weights:
    """Trains these weights with one thread: small products gain little from a second thread."""
    torch.set_num_threads(1)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    state = {name: torch.tensor(array).requires_grad_() for name, array in weights.items()}
    groups = [
        {
            "params": [matrix for matrix in state.values() if matrix.dim() == 2],
            "weight_decay": DECAY,
        },
        {"params": [vector for vector in state.values() if vector.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, plan.peak, betas=BETAS)
    for step in range(1, plan.last + 1):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        batch = next(batches)
        state_of = hidden(state, shape, torch.tensor(batch.ids, dtype=torch.long))
        chosen = state_of.reshape(-1, shape.hidden)[torch.tensor(batch.counted, dtype=torch.long)]
        logits = functional.linear(
            chosen.to(HALF), state["model.embed_tokens.weight"].to(HALF)
        ).float()
        loss = functional.cross_entropy(logits, torch.tensor(batch.targets, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.values(), CLIP)
        optimizer.step()
        watch(step, loss.item(), partial(_arrays, state))
    return _arrays(state)


def _arrays(state: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}


def hidden(state: Mapping[str, Tensor], shape: Shape, ids: Tensor) -> Tensor:
    """Returns the last hidden states [rows, tokens, hidden] in float32."""
    rows, tokens = ids.shape
    groups = shape.heads // shape.kv_heads
    half = shape.head // 2
    speeds = shape.rope_base ** (-torch.arange(half) / half)
    turns = torch.arange(tokens)[:, None] * speeds
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    later = torch.full((tokens, tokens), -torch.inf).triu(1).to(HALF).repeat(groups, 1)[None]

    def product(x: Tensor, name: str) -> Tensor:
        return functional.linear(x.to(HALF), state[f"{name}.weight"].to(HALF))

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.epsilon)
        return x * scale * state[f"{name}.weight"]

    def rotated(x: Tensor) -> Tensor:
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(HALF)

    def attention(x: Tensor, layer: str) -> Tensor:
        query = rotated(product(x, f"{layer}q_proj").view(rows, tokens, shape.heads, shape.head))
        key = rotated(product(x, f"{layer}k_proj").view(rows, tokens, shape.kv_heads, shape.head))
        value = product(x, f"{layer}v_proj").view(rows, tokens, shape.kv_heads, shape.head)
        # One product for all query heads that share a key head: [rows * kv_heads, groups * tokens,
        # head].
        query = query.view(rows, tokens, shape.kv_heads, groups, shape.head).permute(0, 2, 3, 1, 4)
        query = query.reshape(-1, groups * tokens, shape.head)
        key = key.permute(0, 2, 3, 1).reshape(-1, shape.head, tokens)
        value = value.transpose(1, 2).reshape(-1, tokens, shape.head)
        shares = torch.baddbmm(later, query, key, alpha=shape.head**-0.5).softmax(-1)
        mixed = torch.bmm(shares, value)
        mixed = mixed.view(rows, shape.kv_heads, groups, tokens, shape.head)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1)
        return product(mixed, f"{layer}o_proj")

    x = state["model.embed_tokens.weight"][ids]
    for number in range(shape.layers):
        layer = PREFIX.format(number)
        x = x + attention(norm(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
        h = norm(x, f"{layer}post_attention_layernorm")
        gate = functional.silu(product(h, f"{layer}mlp.gate_proj"))
        x = x + product(gate * product(h, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
    return norm(x, "model.norm")
