"""Reads and checks the fields of config.json that many architectures share. No MLX."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed

MAX_INTEGER = 2**31 - 1  # the greatest whole number in config.json; MLX counts with 32 bits
MAX_MODULES = 10_000  # the most layers of a model, or experts of a layer; each has tensor names
FULL, SLIDING = "full_attention", "sliding_attention"


class Heads(Struct, frozen=True):
    """The heads of an attention layer: the numbers of query and key-value heads, and their size."""

    query: int
    kv: int
    dim: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dim: int | None = None) -> Heads:
        """Reads the numbers of heads and their size from config.json.

        `dim`: the default of head_dim; None: hidden_size divided by the number of heads. Raises
        ModelLoadFailed with a missing or unusable key.
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
    """Returns the config of a multimodal model's text part; `config` if it lacks text_config.

    Raises ModelLoadFailed if text_config is not a map.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelLoadFailed(f"config.json has text_config {text!r}, must be a map")
    return text


def layer_count(config: Mapping[str, Any]) -> int:
    """Returns num_hidden_layers. Raises ModelLoadFailed for more than MAX_MODULES."""
    return integer(config, "num_hidden_layers", maximum=MAX_MODULES)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Returns a boolean of config.json; null means the default.

    Raises ModelLoadFailed for other types.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadFailed(f"config.json has {key!r}: {value!r}, must be true or false")
    return default if value is None else value


def require(config: Mapping[str, Any], key: str, allowed: Collection[Any]) -> None:
    """Raises ModelLoadFailed for a value that is not `allowed`; a missing key or null is fine.

    Called for settings of which our code for the architecture implements only the allowed values.
    """
    value = config.get(key)
    if value is not None and value not in allowed:
        shown = " or ".join(repr(choice) for choice in allowed)
        raise ModelLoadFailed(f"config.json has {key} {value!r}, must be {shown}")


def layer_types(
    config: Mapping[str, Any], layers: int, known: Collection[str] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    """Returns the type of each layer; None if config.json does not list them.

    Raises ModelLoadFailed for a type that is not in `known`, or for a wrong number of types.
    """
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        size = len(types) if isinstance(types, list) else types
        raise ModelLoadFailed(f"config.json has layer_types of {size}, must list {layers} layers")
    for kind in types:
        if kind not in known:
            raise ModelLoadFailed(
                f"config.json has {kind!r} in layer_types, must be {' or '.join(known)}"
            )
    return tuple(types)


def layer_windows(
    config: Mapping[str, Any], layers: int, types: tuple[str, ...] | None
) -> tuple[int, ...]:
    """Returns each layer's window in tokens; 0: full attention. All are 0 if `types` is None."""
    if types is None or SLIDING not in types:
        return (0,) * layers
    window = integer(config, "sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in types)


def enabled_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns each layer's window like `layer_windows`, for configs with use_sliding_window.

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
    """Returns the whole number of a key, from 1 to `maximum`; `default` if it is missing.

    Raises ModelLoadFailed with the key.
    """
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
    """Returns the finite number above 0 of a key; `default` if it is missing.

    Raises ModelLoadFailed with the key.
    """
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
    """Returns the value as text, or its size in bits if it has too many digits to show."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"a number of {bits} bits" if bits > 64 else repr(value)


def _unusable(key: str, why: str) -> ModelLoadFailed:
    """Returns the error for a key; its details name the key, so that a check can skip the key."""
    return ModelLoadFailed(why, details={"key": key})
