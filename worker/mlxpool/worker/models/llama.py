"""Llama 2 and 3.x, and Mistral, which is the same but for its names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.models.base import KeyValue, Parts, Plan, Rope, Shape, Step, integer, number

if TYPE_CHECKING:
    import mlx.core as mx

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Args:
    """What config.json says of a llama."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    eps: float
    rope: Rope
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Args:
        """Raises ModelLoadFailed naming the key that is missing or cannot be used."""
        hidden = integer(config, "hidden_size")
        heads = integer(config, "num_attention_heads")
        kv_heads = integer(config, "num_key_value_heads", heads)
        head_dim = integer(config, "head_dim", max(hidden // heads, 1))
        _check(config, heads, kv_heads, head_dim)
        return cls(
            hidden=hidden,
            layers=integer(config, "num_hidden_layers"),
            intermediate=integer(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=integer(config, "vocab_size"),
            context=_context(config),
            eps=number(config, "rms_norm_eps"),
            rope=_rope(config, head_dim),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def _check(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise ModelLoadFailed(
            f"config.json has num_attention_heads {heads}, which is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise ModelLoadFailed(f"config.json has head_dim {head_dim}, must be even to be rotated")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadFailed(
            f"config.json has hidden_act {config['hidden_act']!r}, must be 'silu'"
        )


def _context(config: Mapping[str, Any]) -> int:
    """A sliding window is not built; up to its size it changes nothing, so it bounds this."""
    context = integer(config, "max_position_embeddings")
    return min(context, integer(config, "sliding_window", context))


def _rope(config: Mapping[str, Any], dims: int) -> Rope:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = number({**config, **settings}, "rope_theta", 10000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelLoadFailed(
            f"config.json has rope type {kind!r}, must be one of {', '.join(ROPE_TYPES)}"
        )
    if kind == "linear":
        return Rope(dims, base, scale=1 / number(settings, "factor"))
    if kind == "llama3":
        return Rope(dims, base, freqs=tuple(_llama3_freqs(settings, dims, base)))
    return Rope(dims, base)


def _llama3_freqs(settings: Mapping[str, Any], dims: int, base: float) -> Iterator[float]:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    factor = number(settings, "factor")
    low = number(settings, "low_freq_factor", 1.0)
    high = number(settings, "high_freq_factor", 4.0)
    trained = number(settings, "original_max_position_embeddings", 8192)
    for index in range(0, dims, 2):
        period = base ** (index / dims)
        turns = trained / (2 * math.pi * period)  # full turns within the trained context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0) if high != low else turns > high
        yield period / ((1 - kept) / factor + kept)


def _shapes(args: Args) -> Iterator[tuple[str, Shape]]:
    """Every tensor a checkpoint must have, in the order in which the model uses them."""
    yield "model.embed_tokens.weight", (args.vocab_size, args.hidden)
    for layer in range(args.layers):
        for name, shape in _layer_shapes(args):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (args.hidden,)
    if not args.tied:
        yield "lm_head.weight", (args.vocab_size, args.hidden)


def _layer_shapes(args: Args) -> Iterator[tuple[str, Shape]]:
    d, queries, pairs = args.hidden, args.heads * args.head_dim, args.kv_heads * args.head_dim
    attention, mlp = args.attention_bias, args.mlp_bias
    yield "input_layernorm.weight", (d,)
    yield from _linear("self_attn.q_proj", queries, d, attention)
    yield from _linear("self_attn.k_proj", pairs, d, attention)
    yield from _linear("self_attn.v_proj", pairs, d, attention)
    yield from _linear("self_attn.o_proj", d, queries, attention)
    yield "post_attention_layernorm.weight", (d,)
    yield from _linear("mlp.gate_proj", args.intermediate, d, mlp)
    yield from _linear("mlp.up_proj", args.intermediate, d, mlp)
    yield from _linear("mlp.down_proj", d, args.intermediate, mlp)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


class Attention:
    """x [T, d] -> [T, d]; grouped queries."""

    def __init__(self, args: Args, parts: Parts, layer: int) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.args, self.layer = args, layer
        self.qkv = parts.joined([f"{name}.{one}_proj" for one in "qkv"])
        self.o = parts.linear(f"{name}.o_proj")

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        args, tokens = self.args, x.shape[0]
        both = args.heads + args.kv_heads
        heads = self.qkv(x).reshape(tokens, both + args.kv_heads, args.head_dim)
        qk, v = step.rope(heads[:, :both], args.rope), heads[:, both:]
        q, k = qk[:, : args.heads], qk[:, args.heads :]
        out = step.attend(self.layer, q, k, v, args.head_dim**-0.5)
        return self.o(out.reshape(tokens, -1))


class Block:
    """One layer: x [T, d] -> [T, d]."""

    def __init__(self, args: Args, parts: Parts, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.attention = Attention(args, parts, layer)
        self.before_attention = parts.norm(f"{name}.input_layernorm", args.eps)
        self.before_mlp = parts.norm(f"{name}.post_attention_layernorm", args.eps)
        self.width = args.intermediate
        self.gate_up = parts.joined([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"])
        self.down = parts.linear(f"{name}.mlp.down_proj")
        self.swiglu = parts.swiglu

    def __call__(self, x: mx.array, step: Step) -> mx.array:
        x = x + self.attention(self.before_attention(x), step)
        y = self.gate_up(self.before_mlp(x))
        return x + self.down(self.swiglu(y[:, : self.width], y[:, self.width :]))


class Llama:
    """tokens [T] -> logits [R, vocabulary], see base.Model."""

    def __init__(self, args: Args, parts: Parts) -> None:
        self.embed = parts.embedding("model.embed_tokens")
        self.blocks = [Block(args, parts, layer) for layer in range(args.layers)]
        self.norm = parts.norm("model.norm", args.eps)
        self.head = self.embed.as_linear if args.tied else parts.linear("lm_head")

    def __call__(self, tokens: mx.array, step: Step) -> mx.array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, step)
        return self.head(self.norm(step.wanted(x))) if step.logits else x


def plan(config: Mapping[str, Any]) -> Plan:
    """The plan of a llama; raises ModelLoadFailed naming the key that cannot be used."""
    args = Args.from_config(config)
    return Plan(
        context=args.context,
        vocab_size=args.vocab_size,
        caches=(KeyValue(args.kv_heads, args.head_dim, args.head_dim),) * args.layers,
        shapes=dict(_shapes(args)),
        ignored=partial(_ignored, args.tied),
        build=partial(Llama, args),
    )


def _ignored(tied: bool, name: str) -> bool:
    """Old checkpoints carry their rotation table, and tied ones sometimes the head twice."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
