"""Trains demo-chat with MLX."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from demo_chat.batches import Batch
from demo_chat.training import BETAS, CLIP, DECAY, Plan, Watch
from demo_chat.weights import PREFIX, Shape, Weights

State = dict[str, mx.array]


def train(
    weights: Weights, shape: Shape, plan: Plan, batches: Iterator[Batch], watch: Watch
) -> Weights:
    """Trains these weights, with float32 arithmetic."""
    state = {name: mx.array(array) for name, array in weights.items()}
    matrices = optim.AdamW(plan.peak, betas=list(BETAS), weight_decay=DECAY)
    norms = optim.AdamW(plan.peak, betas=list(BETAS), weight_decay=0.0)
    cost_and_slopes = mx.value_and_grad(lambda state, batch: cost(state, shape, batch))
    for step in range(1, plan.last + 1):
        loss, slopes = cost_and_slopes(state, next(batches))
        slopes, _ = optim.clip_grad_norm(slopes, CLIP)
        for optimizer, dimensions in ((matrices, 2), (norms, 1)):
            optimizer.learning_rate = mx.array(plan.rate(step))
            chosen = {name: slope for name, slope in slopes.items() if slope.ndim == dimensions}
            state |= optimizer.apply_gradients(chosen, {name: state[name] for name in chosen})
        mx.eval(state, matrices.state, norms.state)
        watch(step, float(np.array(loss)), partial(_arrays, state))
    return _arrays(state)


def _arrays(state: State) -> Weights:
    return {name: np.array(array) for name, array in state.items()}


def cost(state: State, shape: Shape, batch: Batch) -> mx.array:
    """Returns the mean loss of the counted tokens, in nats."""
    outputs = hidden(state, shape, mx.array(batch.ids)).reshape(-1, shape.hidden)
    logits = outputs[mx.array(batch.counted)] @ state["model.embed_tokens.weight"].T
    wanted = mx.take_along_axis(logits, mx.array(batch.targets)[:, None], -1)[:, 0]
    return (mx.logsumexp(logits, -1) - wanted).mean()


def hidden(state: State, shape: Shape, ids: mx.array) -> mx.array:
    """Returns the last hidden states [rows, tokens, hidden]."""
    rows, tokens = ids.shape

    def product(x: mx.array, name: str) -> mx.array:
        return x @ state[f"{name}.weight"].T

    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, state[f"{name}.weight"], shape.epsilon)

    def heads(x: mx.array) -> mx.array:
        return x.reshape(rows, tokens, -1, shape.head).transpose(0, 2, 1, 3)

    def rotated(x: mx.array) -> mx.array:
        return mx.fast.rope(
            heads(x), shape.head, traditional=False, base=shape.rope_base, scale=1.0, offset=0
        )

    def attention(x: mx.array, layer: str) -> mx.array:
        mixed = mx.fast.scaled_dot_product_attention(
            rotated(product(x, f"{layer}q_proj")),
            rotated(product(x, f"{layer}k_proj")),
            heads(product(x, f"{layer}v_proj")),
            scale=shape.head**-0.5,
            mask="causal",
        )
        return product(mixed.transpose(0, 2, 1, 3).flatten(-2), f"{layer}o_proj")

    x = state["model.embed_tokens.weight"][ids]
    for number in range(shape.layers):
        layer = PREFIX.format(number)
        x = x + attention(norm(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
        h = norm(x, f"{layer}post_attention_layernorm")
        gate = product(h, f"{layer}mlp.gate_proj")
        gate = gate * mx.sigmoid(gate) * product(h, f"{layer}mlp.up_proj")
        x = x + product(gate, f"{layer}mlp.down_proj")
    return norm(x, "model.norm")
