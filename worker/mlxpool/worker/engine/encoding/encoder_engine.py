"""The engine of encoder models: one pass over whole texts, sorted by length, without padding.

On a CPU a pass may be divided among threads; each thread computes a share of the texts. MLX
computes everything except matrix products on one core, so one share on each core takes less time
than products on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.common.protocol.encoder_calls import Task
from mlxpool.worker import versions
from mlxpool.worker.attention.packed_batch import PackedBatch
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.encoders.folder import Activation, EncoderFolder
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.engine.encoding.pooling import load_dense, pooled
from mlxpool.worker.engine.engine import MemoryUse
from mlxpool.worker.kernels import device
from mlxpool.worker.kernels.cpu_exp import on_linux_cpu
from mlxpool.worker.weights.load import LoadedModel

CLEAR_INTERVAL = 64  # passes between releases of MLX's freed buffers, whose sizes differ
MIN_SHARE = 64  # the least tokens of a share: smaller products are slow
WARM_UP_LENGTHS = (4, 32, 128)  # tokens of a text in the warm-up; a pass has as many texts as fit
ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "": lambda x: x,
    "sigmoid": mx.sigmoid,
    "softmax": lambda x: mx.softmax(x, axis=-1),
}


def shares_of(sizes: Sequence[int], threads: int) -> Iterator[slice]:
    """Yields at most `threads` slices of texts, with about the same number of tokens each.

    `sizes`: the number of tokens of each text. A slice has at least MIN_SHARE tokens, unless it is
    the only slice.
    """
    whole = sum(sizes)
    count = max(1, min(threads, whole // MIN_SHARE))
    begin, tokens, shares = 0, 0, 0
    for index, size in enumerate(sizes):
        if (
            shares < count - 1
            and index > begin
            and tokens + size / 2 > whole * (shares + 1) / count
        ):
            yield slice(begin, index)
            begin, shares = index, shares + 1
        tokens += size
    yield slice(begin, len(sizes))


class EncoderEngine:
    """The Encoder of a loaded model; used by one thread."""

    def __init__(
        self, encoder: EncoderFolder, loaded: LoadedModel, *, limit: int = 0, batch: int = 0
    ) -> None:
        """`limit`: an upper bound of the bytes of the process, see device.memory_limit.

        `batch`: an upper bound of the tokens of a pass, see device.prefill_chunk.
        """
        self._encoder, self._loaded = encoder, loaded
        self._plan, self._model = encoder.plan, loaded.model
        self._limit = device.memory_limit(limit)
        self.lines = device.prefill_chunk(batch)
        self.tasks: frozenset[Task] = frozenset({encoder.task})
        self.context = encoder.source.context
        self.dimensions = encoder.dimensions
        self.normalises = encoder.vectors.normalises
        self.labels = encoder.labels
        self.digest = versions.digest_of(encoder.digest)
        self.yields_cores = not device.on_gpu()
        caches = encoder.plan.model.caches
        self._windows = [cache.window if isinstance(cache, KeyValueSpec) else 0 for cache in caches]
        self._dense = [
            load_dense(encoder.folder.files / dense.file, dense, loaded.dtype)
            for dense in encoder.vectors.dense
        ]
        self._passes = 0
        self._tell_compiles: Callable[[], None] = lambda: None
        self._seen: set[tuple[int, int]] = set()  # sizes of passes that were computed
        # Causal models have functions that MLX compiles. Threads must not share these.
        self.divides = on_linux_cpu() and loaded.dtype == mx.float32 and not self._plan.causal
        self._threads: ThreadPoolExecutor | None = None

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Sets the function that this thread calls before it builds a pass of a new size.

        See Encoder.
        """
        self._tell_compiles = tell

    def encode(self, inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        """Computes one pass over inputs in any order; see Encoder."""
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].ids))
        texts = [inputs[index] for index in order]
        lengths = [len(text.ids) for text in texts]
        size = sum(lengths).bit_length(), lengths[-1].bit_length()
        if size not in self._seen:
            self._tell_compiles()
        shares = list(shares_of(lengths, threads if self.divides else 1))
        if len(shares) == 1:
            answers = self._rows(texts)
        else:
            pool = self._pool()
            rows = [pool.submit(self._rows, texts[share]) for share in shares]
            wait(rows)  # also if a share fails: no thread may compute after an error is raised
            answers = np.concatenate([row.result() for row in rows])
        self._seen.add(size)
        self._passes += 1
        if self._passes % CLEAR_INTERVAL == 0:
            mx.clear_cache()
        result = np.empty_like(answers)
        result[order] = answers
        return result

    def _pool(self) -> ThreadPoolExecutor:
        """Returns the thread pool that computes the shares of a pass; starts missing threads.

        Each thread has its own MLX stream.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                os.cpu_count(), "share", lambda: mx.set_default_stream(mx.new_stream(mx.cpu))
            )
        return self._threads

    def _rows(self, texts: Sequence[EncoderInput]) -> npt.NDArray[np.float32]:
        """Returns results [texts, ...] of texts, which must be sorted by length."""
        types = chain.from_iterable(text.types or (0,) * len(text.ids) for text in texts)
        batch = PackedBatch(
            [len(text.ids) for text in texts], list(types), self._windows, causal=self._plan.causal
        )
        ids = mx.array(np.fromiter(chain.from_iterable(text.ids for text in texts), np.int32))
        return np.array(self._answer(ids, batch).astype(mx.float32))

    def _answer(self, ids: mx.array, batch: PackedBatch) -> mx.array:
        """Returns results [texts, ...] of a batch's texts, in the batch's order."""
        states = self._model.hidden_states(ids, batch)
        if "embed" not in self.tasks:
            logits = self._model.logits_of(pooled(states, batch.texts, (self._plan.pooling,)))
            return ACTIVATIONS[self._encoder.activation](logits.astype(mx.float32))
        vectors = pooled(states, batch.texts, self._encoder.vectors.poolings)
        for dense in self._dense:
            vectors = dense(vectors)
        return vectors

    def device_works(self) -> bool:
        """Returns True if the device still computes; see Encoder."""
        return device.device_computes()

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """Computes passes of the sizes of requests, so that no request waits for compilation.

        See Encoder.
        """
        for length in WARM_UP_LENGTHS:
            length = min(length, self.context)
            self.encode([EncoderInput((0,) * length)] * max(self.lines // length, 1))
            on_progress()
        mx.clear_cache()

    def memory(self) -> MemoryUse:
        """Returns the memory in use; see Encoder."""
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        mx.reset_peak_memory()
        return MemoryUse(
            weights=self._loaded.weight_bytes,
            active=active,
            cache=mx.get_cache_memory(),
            peak=max(active, peak),
            limit=self._limit,
            device_free=device.device_memory()[1],
        )

    def close(self) -> None:
        """Frees all arrays; see Encoder."""
        if self._threads is not None:
            self._threads.shutdown()
        self._dense.clear()
        del self._model, self._loaded
        mx.clear_cache()
