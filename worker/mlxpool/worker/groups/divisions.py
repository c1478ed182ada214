"""The division of each architecture's weights among the ranks of a group. No MLX.

The weights of attention are divided by heads. Those of feed-forwards and experts are divided by
width. The embedding and the output head are divided by tokens of the vocabulary. Weights that no
table below names are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import models
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.layers.config_fields import integer
from mlxpool.worker.layers.derived_weights import TensorSpec
from mlxpool.worker.layers.layer_types import Shape
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.quantisation import GLOBAL_SCALES, QuantLayout
from mlxpool.worker.weights.cuts import Cut
from mlxpool.worker.weights.inspect import ModelFolder

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_LAYER = re.compile(r"^model\.layers\.\d+\.")


class Share(Enum):
    """The part of a module's tensors that a rank has."""

    WHOLE = "whole"
    OUTPUTS = "outputs"  # rows of the weight [..., out, in], and the same rows of the bias
    INPUTS = "inputs"  # columns of the weight; the module adds up the ranks' products
    PARTIAL = "partial"  # as INPUTS, but the enclosing layer adds up the products
    ENTRIES = "entries"  # entries of the first axis


_ATTENTION = {
    "self_attn.q_proj": Share.OUTPUTS,
    "self_attn.k_proj": Share.OUTPUTS,
    "self_attn.v_proj": Share.OUTPUTS,
    "self_attn.o_proj": Share.INPUTS,
}
_LATENT_ATTENTION = {  # latents are whole: all heads share them
    "self_attn.q_proj": Share.OUTPUTS,
    "self_attn.q_b_proj": Share.OUTPUTS,
    "self_attn.embed_q": Share.ENTRIES,
    "self_attn.unembed_out": Share.ENTRIES,
    "self_attn.o_proj": Share.INPUTS,
}
_FEED = {
    "mlp.gate_proj": Share.OUTPUTS,
    "mlp.up_proj": Share.OUTPUTS,
    "mlp.down_proj": Share.INPUTS,
}
_VOCABULARY = {EMBEDDING: Share.OUTPUTS, HEAD: Share.OUTPUTS}


def _experts(name: str) -> dict[str, Share]:
    """Returns the division of an experts module: each rank has a part of each expert.

    So the ranks have equal work.
    """
    return {
        f"{name}.gate_proj": Share.OUTPUTS,
        f"{name}.up_proj": Share.OUTPUTS,
        f"{name}.down_proj": Share.PARTIAL,
    }


class Division(Struct, frozen=True):
    """The division of an architecture.

    `numbers`: the keys of config.json whose values are divided by the number of ranks; the divided
    config describes a rank's part. `shares`: the shares of modules, or of single tensors, by their
    names inside a layer.
    """

    numbers: tuple[str, ...]
    shares: Mapping[str, Share]


_HEADS = ("num_attention_heads", "num_key_value_heads")
_DENSE = Division((*_HEADS, "intermediate_size"), {**_VOCABULARY, **_ATTENTION, **_FEED})

DIVISIONS: Mapping[str, Division] = {
    "glm4_moe_lite": Division(
        ("num_attention_heads", "intermediate_size", "moe_intermediate_size"),
        {
            **_VOCABULARY,
            **_LATENT_ATTENTION,
            **_FEED,
            **_experts("mlp.switch_mlp"),
            **_experts("mlp.shared_experts"),
        },
    ),
    "gpt_oss": Division(
        (*_HEADS, "intermediate_size"),
        {
            **_VOCABULARY,
            **_ATTENTION,
            "self_attn.sinks": Share.ENTRIES,
            **_experts("mlp.experts"),
        },
    ),
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": Division(
        (*_HEADS, "intermediate_size", "moe_intermediate_size"),
        {**_VOCABULARY, **_ATTENTION, **_FEED, **_experts("mlp.switch_mlp")},
    ),
}


def division_of(folder: ModelFolder) -> Division:
    """Returns the division of a model's architecture. Raises ModelLoadFailed if it has none."""
    why = "" if folder.model_type in DIVISIONS else "is not"
    if folder.uses_mlx_lm:
        why = "is computed by mlx-lm's code, which is not"
    if folder.vision is not None:
        why = "reads images, and image encoders are not"
    if why:
        raise ModelLoadFailed(
            f"devices is above 1, but model_type {folder.model_type!r} {why} divided between"
            f" devices; divided are: {', '.join(DIVISIONS)}; leave devices out"
        )
    return DIVISIONS[folder.model_type]


def share_of(division: Division, name: str) -> Share:
    """Returns the share of the module or tensor with this whole name."""
    inner = _LAYER.sub("", name)
    share = division.shares.get(inner)
    return share or division.shares.get(inner.rpartition(".")[0], Share.WHOLE)


class Part(Struct, frozen=True):
    """The part of a model that rank `rank` of `ranks` has.

    `folder` describes the model that the rank builds: the rank's heads and widths, with the whole
    vocabulary and context. `cuts`: the rank's part of each divided weight, by name.
    """

    rank: int
    ranks: int
    division: Division
    folder: ModelFolder
    cuts: Mapping[str, Cut]

    @property
    def first_token(self) -> int:
        """The first token of the vocabulary whose embedding and output weights the rank has."""
        return self.rank * self.tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of the vocabulary whose weights the rank has."""
        return self.folder.plan.embedding_rows // self.ranks


def part_of(folder: ModelFolder, rank: int, ranks: int) -> Part:
    """Returns the part of the model that a rank gets.

    Raises ModelLoadFailed with the part that cannot be divided: the architecture, a key of
    config.json, a tensor, or groups of quantised numbers.
    """
    division = division_of(folder)
    plan = _plan_of_part(folder, division, ranks)
    shapes = dict(_shapes(folder.plan, division, ranks))
    for module, layout in folder.match.layouts.items():
        _require_whole_groups(division, module, layout, shapes[f"{module}.weight"], ranks)
    cuts = {
        name: cut
        for name, spec in folder.match.weights.items()
        if (cut := _cut_of(division, name, spec, rank, ranks)) is not None
    }
    weights = {
        name: replace(spec, shape=cuts[name].shape_of(spec.shape)) if name in cuts else spec
        for name, spec in folder.match.weights.items()
    }
    part = replace(
        folder,
        plan=replace(plan, shapes=shapes),
        match=replace(folder.match, weights=weights),
    )
    return Part(rank, ranks, division, part, cuts)


def _plan_of_part(folder: ModelFolder, division: Division, ranks: int) -> ModelPlan:
    config = dict(folder.config)
    for cache in folder.plan.caches:
        if isinstance(cache, KeyValueSpec):
            config["head_dim"] = cache.key_dim  # its default may depend on the number of heads
    for key in division.numbers:
        if key == "num_key_value_heads":
            count = integer(folder.config, key, integer(folder.config, "num_attention_heads"))
        elif folder.config.get(key) is None:
            continue  # the key belongs to layers that this model does not have
        else:
            count = integer(folder.config, key)
        if count % ranks:
            raise ModelLoadFailed(
                f"devices is {ranks}, but config.json has {key} {count}, which is not a multiple of"
                f" {ranks}: set devices to a divisor of {count}"
            )
        config[key] = count // ranks
    return models.plan(config)


def _shapes(plan: ModelPlan, division: Division, ranks: int) -> Iterator[tuple[str, Shape]]:
    """Yields the name and the shape of each unquantised weight of a rank.

    Raises ModelLoadFailed for a weight that cannot be divided by the number of ranks.
    """
    for name, shape in plan.shapes.items():
        axis = _axis(share_of(division, name), name)
        if axis is None:
            yield name, shape
            continue
        if shape[axis] % ranks:
            raise ModelLoadFailed(
                f"devices is {ranks}, but tensor {name!r} has the shape {list(shape)}, whose"
                f" {shape[axis]} cannot be divided: set devices to a divisor of {shape[axis]}"
            )
        divided = list(shape)
        divided[axis] //= ranks
        yield name, tuple(divided)


def _require_whole_groups(
    division: Division, module: str, layout: QuantLayout, shape: Shape, ranks: int
) -> None:
    """Raises ModelLoadFailed if the division of `shape` would split a quantised group."""
    cut = share_of(division, module) in (Share.INPUTS, Share.PARTIAL)
    if cut and not layout.divides(shape[-1]):
        raise ModelLoadFailed(
            f"devices is {ranks}, which leaves {shape[-1]} numbers of each row of {module!r} to a"
            f" device, not a multiple of {layout.group_size}, the group size of its quantisation;"
            " set fewer devices"
        )


def _axis(share: Share, name: str) -> int | None:
    """Returns the axis along which a tensor is divided; None: it is not divided."""
    kind = name.rpartition(".")[2]
    if kind in GLOBAL_SCALES and share is not Share.ENTRIES:
        return None
    match share:
        case Share.ENTRIES:
            return 0
        case Share.OUTPUTS:
            return -1 if kind == "bias" else -2
        case Share.INPUTS | Share.PARTIAL:
            return None if kind == "bias" else -1
    return None


def _cut_of(division: Division, name: str, spec: TensorSpec, rank: int, ranks: int) -> Cut | None:
    share = share_of(division, name)
    axis = _axis(share, name)
    if axis is not None:
        axis %= len(spec.shape)
        size = spec.shape[axis] // ranks
        return Cut(axis, rank * size, (rank + 1) * size)
    # If ranks' products are added up, one rank adds the bias.
    added = share in (Share.INPUTS, Share.PARTIAL) and name.endswith(".bias")
    return Cut(zeros=True) if added and rank else None
