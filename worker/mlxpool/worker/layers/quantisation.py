"""Quantisation layouts: reads them from config.json, and lists the tensors of each. No MLX.

A module with a quantised weight [..., out, in] has the tensors `weight`, numbers packed in uint32,
and `scales`, one for each group of a row. In mode affine the module has `biases`, too. In mode
nvfp4 it may have a `global_scale`, as MLX writes it, or a `factor` that multiplies products. A
module without `scales` is not quantised.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from mlxpool.common.errors import ModelLoadFailed

WORD_BITS = 32  # bits of a word of packed numbers
GLOBAL_SCALES = ("global_scale", "factor")  # further tensors of nvfp4 weights, see above
FLOAT_DTYPES = ("F32", "F16", "BF16")
NVFP4_RANGE = 448.0 * 6.0  # the divisor of global_scale: the largest scale times the largest number
COLUMN_ROWS = 32  # byte columns have a multiple of this number of rows


class QuantMode(Struct, frozen=True):
    """The values that a quantisation mode allows in its layouts.

    The default is the first of `bits`, and the first of `group_sizes`.
    """

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    scale_dtypes: tuple[str, ...]  # names of dtypes in safetensors
    has_biases: bool = False


MODES = {
    "affine": QuantMode((4, 2, 3, 5, 6, 8), (64, 32, 128), FLOAT_DTYPES, has_biases=True),
    "mxfp4": QuantMode((4,), (32,), ("U8",)),
    "mxfp8": QuantMode((8,), (32,), ("U8",)),
    "nvfp4": QuantMode((4,), (16,), ("U8",)),
}


class QuantLayout(Struct, frozen=True):
    """A layout of quantised weights.

    `bits`: the bits of a number. `group_size`: how many numbers share one scale.
    """

    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.bits} bits in groups of {self.group_size}"

    def tensors(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name, such as scales, and the shape of each tensor of a module.

        The module's dense weight has the shape `shape`.
        """
        *rows, columns = shape
        yield "weight", (*rows, columns * self.bits // WORD_BITS)
        yield "scales", (*rows, columns // self.group_size)
        if MODES[self.mode].has_biases:
            yield "biases", (*rows, columns // self.group_size)

    def divides(self, columns: int) -> bool:
        """Returns True if a row of `columns` numbers fills whole groups and whole words."""
        return columns % self.group_size == 0 and columns * self.bits % WORD_BITS == 0


def byte_columns_bytes(layout: QuantLayout, shape: tuple[int, ...]) -> int:
    """Returns the bytes in which a weight of this shape is stored as byte columns.

    Returns 0 if weights of this layout or shape cannot have this form.
    """
    has_form = layout.mode == "affine" and len(shape) == 2 and shape[0] % COLUMN_ROWS == 0
    if not has_form or sys.platform != "linux":
        return 0
    return math.prod(shape) * (layout.group_size + 8) // layout.group_size  # 8 bytes: scale, bias


class QuantConfig(Struct, frozen=True):
    """The layouts of a model's quantised modules.

    `named` has the layouts of single modules (None: not quantised); all other modules have the
    layout `default`. If there is no `default` and `infer` is true, the shapes of the tensors of
    each other module decide the module's layout.
    """

    default: QuantLayout | None = None
    named: Mapping[str, QuantLayout | None] = field(default_factory=dict)
    infer: bool = False


def parse_quant_config(config: Mapping[str, Any]) -> QuantConfig:
    """Reads config.json. Raises ModelLoadFailed with the value that cannot be used."""
    key = "quantization" if config.get("quantization") else "quantization_config"
    settings = config.get(key)
    if not settings:
        return QuantConfig()
    if not isinstance(settings, Mapping):
        raise ModelLoadFailed(f"config.json has {key!r}: {settings!r}, must be a map")
    if settings.get("quant_method"):
        return QuantConfig(_layout_of_method(key, settings["quant_method"]))
    default = _layout(f"config.json has {key}", settings)
    return QuantConfig(default, dict(_overrides(key, settings, default)))


def _layout_of_method(key: str, method: Any) -> QuantLayout:
    """Returns the layout of a `quant_method` of transformers. Raises ModelLoadFailed."""
    if method not in ("mxfp4", "mxfp8"):
        raise ModelLoadFailed(
            f"config.json has {key} with quant_method {method!r}, which is not read; name an MLX "
            "conversion of the model (affine, mxfp4, mxfp8, nvfp4) or the unquantised one"
        )
    return QuantLayout(method, MODES[method].bits[0], MODES[method].group_sizes[0])


def _overrides(
    key: str, settings: Mapping[str, Any], default: QuantLayout
) -> Iterator[tuple[str, QuantLayout | None]]:
    for name, value in settings.items():
        if isinstance(value, bool):
            yield name, default if value else None
        elif isinstance(value, Mapping):
            yield name, _layout(f"config.json has {key} of {name!r}", value)
        elif "." in name:
            raise ModelLoadFailed(
                f"config.json has {key} of {name!r}: {value!r}, must be a map or false"
            )


def _layout(where: str, settings: Mapping[str, Any]) -> QuantLayout:
    mode = settings.get("mode") or "affine"
    if not isinstance(mode, str) or mode not in MODES:
        raise ModelLoadFailed(f"{where} with mode {mode!r}, must be one of {', '.join(MODES)}")
    allowed = MODES[mode]
    bits = _one_of(where, mode, "bits", settings.get("bits"), allowed.bits)
    group = _one_of(where, mode, "group_size", settings.get("group_size"), allowed.group_sizes)
    return QuantLayout(mode, bits, group)


def _one_of(where: str, mode: str, key: str, value: Any, allowed: tuple[int, ...]) -> int:
    if value is None:
        return allowed[0]
    if type(value) is not int or value not in allowed:
        shown = ", ".join(map(str, sorted(allowed)))
        raise ModelLoadFailed(f"{where} with {key} {value!r}, {mode} allows {shown}")
    return value


def layout_from_shapes(
    module: str,
    columns: int,
    weight: tuple[int, ...],
    scales: tuple[int, ...],
    scales_dtype: str,
) -> QuantLayout:
    """Returns the layout whose tensors have these shapes, for a dense weight [..., columns].

    Raises ModelLoadFailed with the shapes if no layout has such shapes.
    """
    bits = _whole(weight[-1] * WORD_BITS, columns) if weight else 0
    group = _whole(columns, scales[-1]) if scales else 0
    for mode, allowed in MODES.items():
        if (
            bits in allowed.bits
            and group in allowed.group_sizes
            and scales_dtype in allowed.scale_dtypes
        ):
            return QuantLayout(mode, bits, group)
    raise ModelLoadFailed(
        f"module {module!r} has a weight {list(weight)} and scales {list(scales)} of "
        f"{scales_dtype} for rows of {columns}, which is no layout of {', '.join(MODES)}"
    )


def _whole(total: int, parts: int) -> int:
    """Returns total / parts; 0 if it is not a whole number."""
    return total // parts if parts and total % parts == 0 else 0
