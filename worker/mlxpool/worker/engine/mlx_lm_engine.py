"""An engine around the model code of mlx-lm: rows one after the other, each with its own caches.

mlx-lm is imported here alone, when a worker loads such a model, and never before.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx

from mlxpool.common.errors import ModelLoadFailed, OutOfMemory
from mlxpool.common.options import Options
from mlxpool.worker.engine import backend
from mlxpool.worker.engine.base import RowEngine
from mlxpool.worker.engine.mlx_lm_cache import ZooRow, class_of, flat
from mlxpool.worker.prefix import cache as prefix_cache
from mlxpool.worker.prefix.row_copies import RowStore
from mlxpool.worker.prompt.tokenizer import Text
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.draws import draw_of, drawn, last
from mlxpool.worker.scheduling.block_manager import BLOCK, blocks_of, transient
from mlxpool.worker.scheduling.scheduler import area_of
from mlxpool.worker.scheduling.sequence import Drawn, Sequence
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.load import Progress
from mlxpool.worker.weights.mlx_lm_models import cache_kinds_of, features_of

AT_ONCE = 16  # tensors that are read between two reports of progress
WARM_UP = (BLOCK, 2 * BLOCK)  # tokens of the chunks that are measured at load


@contextmanager
def limits_kept() -> Iterator[None]:
    """mlx-lm lowers the limit of open files when it is imported, for good: here it cannot."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *wanted: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def load(folder: ModelFolder, on_progress: Progress = lambda tensors, size: None) -> Any:
    """mlx-lm's model with its weights in memory, in float32 on the CPU.

    Raises ModelLoadFailed in mlx-lm's words.
    """
    with limits_kept():
        from mlx_lm.utils import load_model
    from mlx.utils import tree_flatten

    try:
        model, _ = load_model(folder.path, lazy=True)
    except Exception as error:  # whatever the code of a model raises
        raise ModelLoadFailed(
            f"{folder.path}: mlx-lm cannot load model_type {folder.model_type!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not backend.on_gpu():
        model.set_dtype(mx.float32)
    weights = [array for _, array in tree_flatten(model.parameters())]
    for end in range(AT_ONCE, len(weights) + AT_ONCE, AT_ONCE):
        try:
            mx.eval(*weights[end - AT_ONCE : end])
        except (RuntimeError, OSError) as error:
            raise ModelLoadFailed(f"{folder.path} cannot be read: {error}") from error
        on_progress(len(weights[:end]), sum(array.nbytes for array in weights[:end]))
    return model


class ZooEngine(RowEngine[ZooRow]):
    """The Engine (engine/api.py) of a model of mlx-lm's; lives in one thread."""

    def __init__(
        self,
        model: Any,
        folder: ModelFolder,
        text: Text | None = None,
        *,
        context: int | None = None,
        prefix: str = "tree",
        prefix_bytes: int = 0,
        sequences: int = 8,
        limit: int = 0,
        blocks: int | None = None,
    ) -> None:
        """See ModelEngine, which takes the same."""
        from mlx.utils import tree_flatten
        from mlx_lm.models.cache import make_prompt_cache

        super().__init__(
            folder,
            text,
            weights=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
            context=context,
            prefix_bytes=prefix_bytes,
            sequences=sequences,
            limit=limit,
            blocks=blocks,
        )
        self._model = model
        self._new_row = partial(ZooRow, partial(make_prompt_cache, model))
        kinds = cache_kinds_of(class_of(cache) for cache in flat(self._new_row().caches))
        mode = "off" if kinds is None else prefix
        store = RowStore(self._new_row, kinds or ())
        self._prefix = prefix_cache.build(mode, store, self._prefix_bytes)
        self.features = features_of(mode)
        self.blocks = self._capacity()

    layout = "mlx-lm's code"

    def _compute(self, row: ZooRow, ids: list[int]) -> None:
        self._model(mx.array([ids], dtype=mx.int32), cache=row.caches)
        row.advance(len(ids))
        mx.eval(row.arrays())

    def decode(self, rows: Many[Sequence]) -> list[Drawn]:
        """See Engine.decode. A row's logits stay until its token is taken."""
        with self._losing(rows):
            logits = mx.concatenate([self._logits(seq) for seq in rows])
            sampled = sampler.sample(logits, [draw_of(seq) for seq in rows])
            mx.eval(*sampled.arrays(), *(self._rows[seq].arrays() for seq in rows))
        return drawn(sampled, {seq: line for line, seq in enumerate(rows)})

    def _logits(self, seq: Sequence) -> mx.array:
        """[1, vocabulary], after all tokens of the sequence."""
        row = self._rows[seq]
        if row.logits is None or row.offset != seq.length:
            self._require(row, seq.length - 1)
            ids = mx.array([[last(seq)]], dtype=mx.int32)
            logits = self._model(ids, cache=row.caches)[:, -1, : self.vocab_size]
            row.advance(1)
            row.logits = logits
        return row.logits

    def _require(self, row: ZooRow, tokens: int) -> None:
        if row.offset < tokens:
            raise OutOfMemory(f"{tokens} tokens were lost with a step that failed")
        assert row.offset == tokens, f"a row of {row.offset} tokens was taken for one of {tokens}"

    @contextmanager
    def _losing(self, hit: Many[Sequence]) -> Iterator[None]:
        """A pass that fails half-way leaves nothing of the rows that it wrote to."""
        try:
            yield
        except Exception:
            for seq in hit:
                self._rows[seq].release()
            raise

    def warm_up(self, moved: Callable[[], None] = lambda: None) -> None:
        """See Engine.warm_up. What mlx-lm's caches take can only be seen; they grow by blocks."""
        small, large = (self._warm(min(n, self.context - 2), moved) for n in WARM_UP)
        grown, more = large[1] - small[1], blocks_of(large[0]) - blocks_of(small[0])
        self._block_bytes = max(1, grown // more if more else small[1])
        self._per_row = max(0, small[1] - self._block_bytes)
        if small[0] < large[0]:
            chunks = (small[0], small[2]), (large[0], large[2])
            self._transient = transient(*chunks, self.chunk, area_of(self.chunk))
        self._settle()

    def _warm(self, size: int, moved: Callable[[], None]) -> tuple[int, int, int]:
        """A chunk of `size` tokens and a token more: tokens, the row's bytes, a step's bytes."""
        seq = Sequence(b"", 0, (0,) * (max(size, 1) + 1), Options(), 0, 1)
        row = self._rows[seq] = self._new_row()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self.prefill(seq, size)
        peak, taken = mx.get_peak_memory() - before, row.nbytes
        self.decode([seq])
        moved()
        del self._rows[seq]
        return size, taken, peak
