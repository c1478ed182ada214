"""Computes the bytes that a decode step must read, which bound the tokens/s.

No engine can decode faster than the memory delivers these bytes. `mlxpool bench engine
--memory-rate` prints the measured tokens/s as a share of this bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.bench import tensors
from mlxpool.worker.caches.specs import CacheSpec, KeyValueSpec, RecurrentSpec

WIDTH = 2  # bytes of a number that is not quantised
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
EMBEDDING, HEAD = "model.embed_tokens.", "lm_head."


class Routing(Struct, frozen=True):
    """The routing of experts: a token uses `chosen` of `count` experts; 1 of 1 in dense models."""

    count: int = 1
    chosen: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Routing:
        """Reads the numbers of experts from a config.json."""
        for key in EXPERT_COUNTS:
            if key in config:
                return cls(int(config[key]), int(config["num_experts_per_tok"]))
        return cls()

    def share(self, rows: int) -> float:
        """Returns the expected fraction of experts that `rows` tokens use under uniform routing."""
        return 1 - (1 - self.chosen / self.count) ** rows


def weight_bytes(stored: Mapping[str, int], routing: Routing, rows: int) -> float:
    """Returns the bytes of weights that a step of `rows` sequences, a token each, must read.

    `stored`: the bytes of each tensor, by its name. A step reads the experts that any token uses,
    one row of the embedding table for each token, and all other tensors.
    """
    separate = any(name.startswith(HEAD) for name in stored)
    total = 0.0
    for name, size in stored.items():
        if tensors.is_of_experts(name):
            total += size * routing.share(rows)
        elif not (separate and name.startswith(EMBEDDING)):
            total += size
    return total


def cache_bytes(caches: Sequence[CacheSpec], lengths: Sequence[int], width: int = WIDTH) -> int:
    """Returns the cached bytes that a step reads for sequences of these lengths, in tokens.

    `width`: the bytes of a number that is not quantised.
    """
    total = 0
    for spec in caches:
        if isinstance(spec, RecurrentSpec):
            total += len(lengths) * spec.state_bytes
            continue
        window = spec.window if isinstance(spec, KeyValueSpec) else 0
        token = sum(store.token_bytes(width) for store in spec.stored())
        total += sum(min(length, window or length) for length in lengths) * token
    return total
