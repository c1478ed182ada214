"""What many config.json files say alike, checked. No MLX."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import ModelLoadFailed

MAX_INTEGER = 2**31 - 1  # of any whole number in config.json; MLX counts so far
MAX_MODULES = 10_000  # layers of a model, experts of a layer; each has names of its own
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads ask, how many they share keys and values of, and their size."""

    queries: int
    pairs: int
    size: int

    @classmethod
    def of(cls, config: Mapping[str, Any], *, size: int | None = None) -> Heads:
        """`size` where config.json has no head_dim; without one, what hidden_size gives each.

        Raises ModelLoadFailed naming the key that is missing or cannot be used.
        """
        queries = integer(config, "num_attention_heads")
        pairs = integer(config, "num_key_value_heads", queries)
        if queries % pairs:
            raise ModelLoadFailed(
                f"config.json has num_attention_heads {queries}, which is no multiple of "
                f"num_key_value_heads {pairs}"
            )
        share = max(integer(config, "hidden_size") // queries, 1)
        size = integer(config, "head_dim", size or share)
        if size % 2:
            raise ModelLoadFailed(f"config.json has head_dim {size}, must be even to be rotated")
        return cls(queries, pairs, size)


def layer_count(config: Mapping[str, Any]) -> int:
    """Raises ModelLoadFailed for more layers than any model has."""
    return integer(config, "num_hidden_layers", most=MAX_MODULES)


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """true or false of config.json; null is the default."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadFailed(f"config.json has {key!r}: {value!r}, must be true or false")
    return default if value is None else value


def require(config: Mapping[str, Any], key: str, allowed: Collection[Any]) -> None:
    """Refuses a value that would be computed otherwise; a key that is not there is fine.

    Raises ModelLoadFailed with what is allowed.
    """
    value = config.get(key)
    if value is not None and value not in allowed:
        shown = " or ".join(repr(one) for one in allowed)
        raise ModelLoadFailed(f"config.json has {key} {value!r}, must be {shown}")


def layer_types(
    config: Mapping[str, Any], layers: int, known: Collection[str] = (FULL, SLIDING)
) -> tuple[str, ...] | None:
    """The kind of each layer, or None where config.json does not list them."""
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
    """The window of each layer, 0 for full attention; without `types` all are full."""
    if types is None or SLIDING not in types:
        return (0,) * layers
    window = integer(config, "sliding_window")
    return tuple(window if one == SLIDING else 0 for one in types)


def integer(
    config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_INTEGER
) -> int:
    """A whole number from 1 to `most` of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a whole number above 0")
    if value > most:
        raise _unusable(key, f"config.json has {key!r}: {_brief(value)}, must be at most {most}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0 of config.json; raises ModelLoadFailed naming the key."""
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
    """Without all the digits that a whole number may have."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"a number of {bits} bits" if bits > 64 else repr(value)


def _unusable(key: str, why: str) -> ModelLoadFailed:
    """With the key in its details: whoever looks for all faults goes on behind it."""
    return ModelLoadFailed(why, details={"key": key})
