"""The settings of an engine that computes with MLX. No MLX."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.worker.caches.stored import AUTO


class EngineSettings(Struct, frozen=True, kw_only=True):
    """How an engine opens a loaded model.

    `context`: bounds the context length of the model. `prefix`: a mode of the prefix cache.
    `prefix_bytes` 0: a quarter of what the weights leave of the limit. `max_sequences`: the rows of
    a pass at most. `limit`: bounds the bytes of the process, see device.memory_limit. `blocks`:
    those that rows and prefixes have; None: as many as the limit leaves. `step_target`: seconds of
    a pass while sequences decode; 0: the warm-up chooses it. `batch`: bounds the tokens of a pass,
    see device.prefill_chunk. `by_owner`: sequences find only the prefixes that sequences of their
    owner left.

    mlx-lm's code has none of the others. `keeps_measurement`: whether a later load on a CPU may
    take the figures of this one. `lookahead`: a pass may be submitted while one is in
    flight; None: only on a GPU. `layout` None: see choose_layout. `kv`: what rows store, see
    caches/stored.py.
    """

    context: int | None = None
    prefix: str = "tree"
    prefix_bytes: int = 0
    max_sequences: int = 8
    limit: int = 0
    blocks: int | None = None
    step_target: float = 0.0
    batch: int = 0
    by_owner: bool = False
    lookahead: bool | None = None
    layout: str | None = None
    kv: str = AUTO
    keeps_measurement: bool = False


DEFAULTS = EngineSettings()
