"""An engine of mlx-lm's model code: computes row by row, each with its own caches.

Only this module imports mlx-lm, when a worker loads such a model.
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
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.engine.row_engine import RowEngine
from mlxpool.worker.kernels import device
from mlxpool.worker.mlx_lm.rows import MlxLmRow, class_name, flatten
from mlxpool.worker.prefix import cache as prefix_cache
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import (
    SampleRequest,
    last_token,
    penalty_history,
    sampled_tokens,
)
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, activation_bytes, blocks_for
from mlxpool.worker.scheduling.scheduler import pair_budget
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.load import OnProgress
from mlxpool.worker.weights.mlx_lm_models import cache_kinds_of, features_of

TENSORS_PER_REPORT = 16  # tensors that are read between two progress reports
# Tokens of the chunks that are measured at load.
WARM_UP_CHUNKS = (KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS)


@contextmanager
def open_file_limit_kept() -> Iterator[None]:
    """Keeps the limit of open files while mlx-lm is imported, which would lower it for good."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *wanted: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def load(folder: ModelFolder, on_progress: OnProgress = lambda tensors, size: None) -> Any:
    """Loads mlx-lm's model with its weights, in float32 on the CPU.

    Raises ModelLoadFailed with mlx-lm's message.
    """
    with open_file_limit_kept():
        from mlx_lm.utils import load_model
    from mlx.utils import tree_flatten

    try:
        model, _ = load_model(folder.path, lazy=True)
    except Exception as error:  # the code of a model may raise anything
        raise ModelLoadFailed(
            f"{folder.path}: mlx-lm cannot load model_type {folder.model_type!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not device.on_gpu():
        model.set_dtype(mx.float32)
    weights = [array for _, array in tree_flatten(model.parameters())]
    for end in range(TENSORS_PER_REPORT, len(weights) + TENSORS_PER_REPORT, TENSORS_PER_REPORT):
        try:
            mx.eval(*weights[end - TENSORS_PER_REPORT : end])
        except (RuntimeError, OSError) as error:
            raise ModelLoadFailed(f"{folder.path} cannot be read: {error}") from error
        on_progress(len(weights[:end]), sum(array.nbytes for array in weights[:end]))
    return model


class MlxLmEngine(RowEngine[MlxLmRow]):
    """The Engine of a model that mlx-lm's code computes; used by one thread."""

    def __init__(
        self,
        model: Any,
        folder: ModelFolder,
        text: ChatTokenizer | TokenTable | None = None,
        *,
        context: int | None = None,
        prefix: str = "tree",
        prefix_bytes: int = 0,
        max_sequences: int = 8,
        limit: int = 0,
        blocks: int | None = None,
    ) -> None:
        """See ModelEngine, which has the same parameters."""
        from mlx.utils import tree_flatten
        from mlx_lm.models.cache import make_prompt_cache

        super().__init__(
            folder,
            text,
            weights=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
            context=context,
            prefix_bytes=prefix_bytes,
            max_sequences=max_sequences,
            limit=limit,
            blocks=blocks,
        )
        self._model = model
        self._new_row = partial(MlxLmRow, partial(make_prompt_cache, model))
        kinds = cache_kinds_of(class_name(cache) for cache in flatten(self._new_row().caches))
        mode = "off" if kinds is None else prefix
        store = RowStore(self._new_row, kinds or ())
        self._prefix = prefix_cache.make_prefix_cache(mode, store, self._prefix_bytes)
        self.features = features_of(mode)
        self.blocks = self._capacity()

    layout = "mlx-lm's code"

    def _compute(self, row: MlxLmRow, ids: list[int]) -> None:
        self._model(mx.array([ids], dtype=mx.int32), cache=row.caches)
        row.advance(len(ids))
        mx.eval(row.arrays())

    def decode(self, rows: Many[Sequence]) -> list[SampledToken]:
        """See Engine.decode. A row keeps its logits until its token is sampled."""
        with self._discard_on_failure(rows):
            logits = mx.concatenate([self._logits(seq) for seq in rows])
            requests = [
                SampleRequest(seq.options, seq.seed, len(seq.ids), penalty_history(seq))
                for seq in rows
            ]
            sampled = sampler.sample(logits, requests)
            mx.eval(*sampled.arrays(), *(self._rows[seq].arrays() for seq in rows))
        return sampled_tokens(sampled, {seq: line for line, seq in enumerate(rows)})

    def _logits(self, seq: Sequence) -> mx.array:
        """Returns logits [1, vocabulary] after all tokens of the sequence."""
        row = self._rows[seq]
        if row.logits is None or row.offset != seq.length:
            self._require(row, seq.length - 1)
            ids = mx.array([[last_token(seq)]], dtype=mx.int32)
            logits = self._model(ids, cache=row.caches)[:, -1, : self.vocab_size]
            row.advance(1)
            row.logits = logits
        return row.logits

    def _require(self, row: MlxLmRow, tokens: int) -> None:
        if row.offset < tokens:
            raise OutOfMemory(f"{tokens} tokens were lost with a step that failed")
        assert row.offset == tokens, f"a row of {row.offset} tokens was taken for one of {tokens}"

    @contextmanager
    def _discard_on_failure(self, hit: Many[Sequence]) -> Iterator[None]:
        """See RowEngine. A failed pass may have written to each of its rows."""
        try:
            yield
        except Exception:
            for seq in hit:
                self._rows[seq].release()
            raise

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """See Engine.warm_up. Measures the size of mlx-lm's caches, which grow by blocks."""
        small, large = (
            self._measure_row(min(n, self.context - 2), on_progress) for n in WARM_UP_CHUNKS
        )
        grown, more = large[1] - small[1], blocks_for(large[0]) - blocks_for(small[0])
        self._block_bytes = max(1, grown // more if more else small[1])
        self._row_bytes = max(0, small[1] - self._block_bytes)
        if small[0] < large[0]:
            chunks = (small[0], small[2]), (large[0], large[2])
            self._activation_bytes = activation_bytes(*chunks, self.chunk, pair_budget(self.chunk))
        self._finish_warm_up()

    def _measure_row(self, size: int, on_progress: Callable[[], None]) -> tuple[int, int, int]:
        """Computes a chunk of `size` tokens and a decode step.

        Returns the tokens of the chunk, the bytes of the row and the peak bytes of the chunk.
        """
        seq = Sequence(b"", 0, (0,) * (max(size, 1) + 1), Options(), 0, 1)
        row = self._rows[seq] = self._new_row()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self.prefill(seq, size)
        peak, taken = mx.get_peak_memory() - before, row.nbytes
        self.decode([seq])
        on_progress()
        del self._rows[seq]
        return size, taken, peak
