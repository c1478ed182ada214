"""The tensors of the folder of a shape, with the layouts that mlx-lm's conversions have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.worker import models
from mlxpool.worker.layers.quantisation import MODES, WORD_BITS, QuantLayout, parse_quant_config

# Of each architecture, the modules of a layer that choose experts. mlx-lm quantises those of
# LINEAR_ROUTERS to 8 bits, whatever the mode of all others, and never those of DENSE_ROUTERS.
LINEAR_ROUTERS = {"gpt_oss": "mlp.router", "qwen3_moe": "mlp.gate"}
DENSE_ROUTERS = {"glm4_moe_lite": "mlp.gate"}
ROUTER_LAYOUT = {"group_size": 64, "bits": 8}
# Published in this mode with all but the experts in 16 bits, which conversions keep.
EXPERTS_ALONE = {"gpt_oss": "mxfp4"}
# What is added to the scores of experts to choose them. Trained ones balance how often each expert
# is chosen; with random weights zeros do, and random ones would make some of them rare.
CORRECTION = ".e_score_correction_bias"
EXPERTS = (".switch_mlp.", ".experts.")  # in names of tensors of all experts of a layer


class PlannedTensor(Struct, frozen=True):
    """A tensor of a model, or a quantised weight, which a folder stores as several."""

    name: str
    shape: tuple[int, ...]  # not quantised
    layout: QuantLayout | None

    def nbytes(self, width: int) -> int:
        """The bytes that it takes in a folder whose dense numbers have `width` bytes."""
        if self.layout is None:
            return math.prod(self.shape) * width
        groups = 1 if MODES[self.layout.mode].scale_dtypes == ("U8",) else width
        sizes = {"weight": WORD_BITS // 8, "scales": groups, "biases": groups}
        return sum(
            math.prod(shape) * sizes[kind] for kind, shape in self.layout.tensors(self.shape)
        )


def quantisation_of(config: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The member `quantization` of the config.json of a folder in this mode.

    Raises ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
    allowed = MODES[mode]
    setting = {"group_size": allowed.group_sizes[0], "bits": allowed.bits[0], "mode": mode}
    router = LINEAR_ROUTERS.get(config["model_type"])
    if router is None or EXPERTS_ALONE.get(config["model_type"]) == mode:
        return setting
    layers = range(config["num_hidden_layers"])
    return setting | {f"model.layers.{layer}.{router}": ROUTER_LAYOUT for layer in layers}


def planned(config: Mapping[str, Any]) -> Iterator[PlannedTensor]:
    """The tensors that the folder of a config.json of `checkpoint.config_of` has."""
    found = parse_quant_config(config)
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    for name, shape in models.plan(plain).shapes.items():
        module = name.removesuffix(".weight")
        layout = found.named.get(module, found.default)
        if layout is not None and not _quantises(config, layout, name, shape):
            layout = None
        yield PlannedTensor(name, tuple(shape), layout)


def _quantises(
    config: Mapping[str, Any], layout: QuantLayout, name: str, shape: tuple[int, ...]
) -> bool:
    """Whether a conversion quantises the tensor."""
    kind = config["model_type"]
    if not name.endswith(".weight") or len(shape) < 2 or not layout.divides(shape[-1]):
        return False
    if kind in DENSE_ROUTERS and name.endswith(f".{DENSE_ROUTERS[kind]}.weight"):
        return False
    return EXPERTS_ALONE.get(kind) != layout.mode or is_of_experts(name)


def is_of_experts(name: str) -> bool:
    """Whether the tensor of this name is of experts that tokens choose."""
    return any(part in name for part in EXPERTS)
