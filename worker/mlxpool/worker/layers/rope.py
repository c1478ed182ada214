"""Reads the rotary position embedding (RoPE) of a config.json. No MLX.

Models support longer contexts by scaled wavelengths: `rope_scaling` (newer: `rope_parameters`)
names the rope type, and SCALINGS has a function for each type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import integer, number
from mlxpool.worker.layers.layer_types import Rope

Settings: TypeAlias = Mapping[str, Any]


def parse_rope(
    config: Settings, dims: int, *, base: float | None = 10000.0, traditional: bool = False
) -> Rope:
    """Returns the rotation of a head's first `dims` numbers; `base`: the default of rope_theta.

    With `base=None` config.json must have rope_theta: other programs disagree on its default.
    Raises ModelLoadFailed with the rope type or key that cannot be used.
    """
    if dims % 2:
        raise ModelLoadFailed(f"config.json rotates {dims} numbers of each head, must be even")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelLoadFailed(f"config.json has rope_scaling {scaling!r}, must be a map")
    settings = {**config, **scaling}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ModelLoadFailed(
            f"config.json has rope type {kind!r}, must be one of {', '.join(SCALINGS)}"
        )
    plain = Rope(dims, number(settings, "rope_theta", base), traditional=traditional)
    try:
        return SCALINGS[kind](plain, settings)
    except (ArithmeticError, ValueError) as error:  # absurd numbers, which no real file has
        raise ModelLoadFailed(
            f"config.json has values that are not valid for rope type {kind!r}: {error}"
        ) from error


def _default(plain: Rope, settings: Settings) -> Rope:
    return plain


def _linear(plain: Rope, settings: Settings) -> Rope:
    return replace(plain, scale=1 / number(settings, "factor"))


def _llama3(plain: Rope, settings: Settings) -> Rope:
    """Multiplies long wavelengths by `factor`, keeps short wavelengths, and blends the others."""
    low = number(settings, "low_freq_factor", 1.0)
    high = number(settings, "high_freq_factor", 4.0)
    trained = number(settings, "original_max_position_embeddings", 8192)

    def kept(period: float) -> float:
        turns = trained / (2 * math.pi * period)  # full turns within the trained context
        return _ramp(turns, low, high) if high != low else float(turns > high)

    return replace(
        plain, freqs=_blended(plain, settings, [kept(period) for period in _periods(plain)])
    )


def _yarn(plain: Rope, settings: Settings) -> Rope:
    """Blends scaled and unscaled wavelengths, and adds a gain that keeps the spread of scores.

    The blend begins and ends at whole dimensions, with any value of `truncate`.
    """
    trained = integer(settings, "original_max_position_embeddings")

    def dimension(turns: float) -> float:
        """Returns the dimension whose wave makes `turns` turns within the trained context."""
        wave = trained / (turns * 2 * math.pi)
        return plain.dims * math.log(wave) / (2 * math.log(plain.base))

    low = max(math.floor(dimension(number(settings, "beta_fast", 32.0))), 0)
    high = min(math.ceil(dimension(number(settings, "beta_slow", 1.0))), plain.dims - 1)
    top = high if high != low else high + 0.001
    kept = [1 - _ramp(index, low, top) for index in range(plain.dims // 2)]
    factor = number(settings, "factor")
    gain = yarn_mscale(factor, _weight(settings, "mscale", 1.0))
    gain /= yarn_mscale(factor, _weight(settings, "mscale_all_dim", 0.0))
    return replace(plain, freqs=_blended(plain, settings, kept), gain=gain)


def yarn_mscale(factor: float, weight: float) -> float:
    """Returns YaRN's gain of queries, and of keys, in a context stretched by `factor`.

    Latent attention multiplies its scale by the gain's square, with `mscale_all_dim` as `weight`.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(plain: Rope, settings: Settings) -> Rope:
    """Multiplies each wavelength by its own factor.

    Short texts get the factors for long texts, too: keys in the cache cannot change when a text
    gets long.
    """
    factors = settings.get("long_factor")
    pairs = plain.dims // 2
    if not isinstance(factors, list) or len(factors) != pairs:
        size = len(factors) if isinstance(factors, list) else factors
        raise ModelLoadFailed(f"config.json has long_factor of {size}, must list {pairs} numbers")
    factors = [number({"long_factor": factor}, "long_factor") for factor in factors]
    trained = integer(settings, "original_max_position_embeddings")
    stretch = integer(settings, "max_position_embeddings") / trained
    gain = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    freqs = [factor * period for factor, period in zip(factors, _periods(plain), strict=True)]
    return replace(plain, freqs=tuple(freqs), gain=gain)


def _periods(plain: Rope) -> list[float]:
    return [plain.base ** (index / plain.dims) for index in range(0, plain.dims, 2)]


def _blended(plain: Rope, settings: Settings, kept: list[float]) -> tuple[float, ...]:
    """Returns blended wavelengths.

    `kept` has a number from 0 to 1 for each wavelength: 1 gives the plain wavelength, 0 a
    wavelength `factor` times as long.
    """
    factor = number(settings, "factor")
    waves = zip(_periods(plain), kept, strict=True)
    return tuple(period / ((1 - part) / factor + part) for period, part in waves)


def _ramp(at: float, low: float, high: float) -> float:
    return min(max((at - low) / (high - low), 0.0), 1.0)


def _weight(settings: Settings, key: str, default: float) -> float:
    """Returns a number of the config; 0, null and a missing key mean the default."""
    return number(settings, key) if settings.get(key) else default


SCALINGS: Mapping[str, Callable[[Rope, Settings], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "mrope": _default,  # three axes, with equal positions for text
}
