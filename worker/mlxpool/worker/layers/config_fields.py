"""Checked reading of config.json: what many architectures have in common. No MLX."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed

MAX_INTEGER = 2**31 - 1  # of any whole number in config.json; MLX counts with 32 bits
MAX_MODULES = 10_000  # layers of a model, or experts of a layer; each has tensor names
FULL, SLIDING = "full_attention", "sliding_attention"


class Heads(Struct, frozen=True):
    """The heads of an attention layer: numbers of query and of key-value heads, and their size."""

    query: int
    kv: int
    dim: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dim: int | None = None) -> Heads:
        """`dim` is the default of head_dim; without it, hidden_size is divided among the heads.

        Raises ModelLoadFailed naming the key that is missing or cannot be used.
        """
        query = integer(config, "num_attention_heads")
        kv = integer(config, "num_key_value_heads", query)
        if query % kv:
            raise ModelLoadFailed(
                f"config.json has num_attention_heads {query}, which is no multiple of "
                f"num_key_value_heads {kv}"
            )
        share = max(integer(config, "hidden_size") // query, 1)
        dim = integer(config, "head_dim", dim or share)
        if dim % 2:
            raise ModelLoadFailed(f"config.json has head_dim {dim}, must be even to be rotated")
        return cls(query, kv, dim)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a multimodal model's text part, or `config` where it has no text_config.

    Raises ModelLoadFailed where text_config is no map.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelLoadFailed(f"config.json has text_config {text!r}, must be a map")
    return text


def layer_count(config: Mapping[str, Any]) -> int:
    """num_hidden_layers; raises ModelLoadFailed for more than MAX_MODULES."""
    return integer(config, "num_hidden_layers", maximum=MAX_MODULES)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean of config.json; null is the default. Raises ModelLoadFailed for other types."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadFailed(f"config.json has {key!r}: {value!r}, must be true or false")
    return default if value is None else value


def require(config: Mapping[str, Any], key: str, allowed: Collection[Any]) -> None:
    """Raises ModelLoadFailed for a value that is not `allowed`; a missing key or null is fine.

    For settings that the architecture's file does not implement.
    """
    value = config.get(key)
    if value is not None and value not in allowed:
        shown = " or ".join(repr(one) for one in allowed)
        raise ModelLoadFailed(f"config.json has {key} {value!r}, must be {shown}")


def layer_types(
    config: Mapping[str, Any], layers: int, known: Collection[str] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    """The type of each layer, or None where config.json does not list them.

    Raises ModelLoadFailed for a type that is not in `known`, or another number of them.
    """
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        size = len(types) if isinstance(types, list) else types
        raise ModelLoadFailed(f"config.json has layer_types of {size}, must list {layers} layers")
    for one in types:
        if one not in known:
            raise ModelLoadFailed(
                f"config.json has {one!r} in layer_types, must be {' or '.join(known)}"
            )
    return tuple(types)


def layer_windows(
    config: Mapping[str, Any], layers: int, types: tuple[str, ...] | None
) -> tuple[int, ...]:
    """The window of each layer in tokens, 0 for full attention; without `types` all are full."""
    if types is None or SLIDING not in types:
        return (0,) * layers
    window = integer(config, "sliding_window")
    return tuple(window if one == SLIDING else 0 for one in types)


def enabled_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """As `layer_windows`, for configs that have use_sliding_window.

    Without layer_types, the layers from `max_window_layers` on have a window.
    """
    layers = layer_count(config)
    if not flag(config, "use_sliding_window"):
        return (0,) * layers
    types = layer_types(config, layers)
    if types is None:
        full = min(integer(config, "max_window_layers"), layers)
        types = (FULL,) * full + (SLIDING,) * (layers - full)
    return layer_windows(config, layers, types)


def integer(
    config: Mapping[str, Any], key: str, default: int | None = None, maximum: int = MAX_INTEGER
) -> int:
    """A whole number from 1 to `maximum`; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a whole number above 0")
    if value > maximum:
        raise _unusable(key, f"config.json has {key!r}: {_brief(value)}, must be at most {maximum}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a number above 0")
    if value > sys.float_info.max:
        raise _unusable(key, f"config.json has {key!r}: {_brief(value)}, must be finite")
    return float(value)


def _brief(value: float) -> str:
    """The value, or its size in bits where it has too many digits to show."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"a number of {bits} bits" if bits > 64 else repr(value)


def _unusable(key: str, why: str) -> ModelLoadFailed:
    """The error with the key in its details, by which a search for all faults goes on."""
    return ModelLoadFailed(why, details={"key": key})
