"""The settings of an engine that computes with MLX. No MLX."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.worker.caches.stored import AUTO


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The settings of an engine that opens a loaded model.

    `context`: an upper bound of the model's context length. `prefix`: the mode of the prefix cache.
    `prefix_bytes`: the budget of the prefix cache; 0: a quarter of the bytes that the weights leave
    of the limit. `max_sequences`: the most rows of a pass. `limit`: an upper bound of the bytes of
    the process, see device.memory_limit. `blocks`: the blocks of rows and prefixes; None: as many
    as the limit leaves. `step_target`: the seconds by which prompts may lengthen a pass in which
    sequences decode; 0: the warm-up chooses it. `batch`: an upper bound of the tokens of a pass,
    see device.prefill_chunk. `by_owner`: sequences find only the prefixes of sequences with the
    same owner.

    mlx-lm's code ignores the settings that follow. `keeps_measurement`: a later load on a CPU may
    use the measurements of this load. `lookahead`: a pass may be submitted while another is in
    flight; None: only on a GPU. `layout`: the name of the rows' layout; if it is None,
    `choose_layout` decides. `kv`: the format of stored keys and values, see caches/stored.py.
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
