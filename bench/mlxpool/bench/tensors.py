"""Lists the tensors of a shape's model folder, in the layouts of mlx-lm's conversions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.worker import models
from mlxpool.worker.layers.quantisation import MODES, WORD_BITS, QuantLayout, parse_quant_config

# The routers of a layer, which choose experts, for each architecture. mlx-lm quantises
# LINEAR_ROUTERS to 8 bits in every mode, and never quantises DENSE_ROUTERS.
LINEAR_ROUTERS = {"gpt_oss": "mlp.router", "qwen3_moe": "mlp.gate"}
DENSE_ROUTERS = {"glm4_moe_lite": "mlp.gate"}
ROUTER_LAYOUT = {"group_size": 64, "bits": 8}
# Architectures whose published models have experts in this mode and all other tensors in 16 bits.
# Conversions keep these formats.
EXPERTS_ALONE = {"gpt_oss": "mxfp4"}
# A bias that is added to the experts' scores only for the choice of experts. Trained biases balance
# the use of the experts. With random weights zeros balance it; random biases would make some
# experts rare.
CORRECTION = ".e_score_correction_bias"
EXPERTS = (".switch_mlp.", ".experts.")  # parts of names of tensors of all experts of a layer


class PlannedTensor(Struct, frozen=True):
    """A tensor of a model, or a quantised weight, which a folder stores as several tensors."""

    name: str
    shape: tuple[int, ...]  # without quantisation
    layout: QuantLayout | None

    def nbytes(self, width: int) -> int:
        """Returns the tensor's bytes in a folder whose dense numbers have `width` bytes."""
        if self.layout is None:
            return math.prod(self.shape) * width
        groups = 1 if MODES[self.layout.mode].scale_dtypes == ("U8",) else width
        sizes = {"weight": WORD_BITS // 8, "scales": groups, "biases": groups}
        return sum(
            math.prod(shape) * sizes[kind] for kind, shape in self.layout.tensors(self.shape)
        )


def quantisation_of(config: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Returns the member `quantization` of the config.json of a folder with this quantisation mode.

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
    """Yields the tensors of a folder with a config.json of `checkpoint.config_of`."""
    quantisation = parse_quant_config(config)
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    for name, shape in models.plan(plain).shapes.items():
        module = name.removesuffix(".weight")
        layout = quantisation.named.get(module, quantisation.default)
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
    """Whether this is the name of a tensor of experts that tokens choose."""
    return any(part in name for part in EXPERTS)
