"""The engine of encoder models: one pass over whole texts, sorted by length, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker import versions
from mlxpool.worker.attention.packed_batch import PackedBatch
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.encoders.folder import Activation, EncoderFolder
from mlxpool.worker.encoders.inputs import EncoderInput, Task
from mlxpool.worker.engine.engine import MemoryUse
from mlxpool.worker.engine.pooling import load_dense, pooled
from mlxpool.worker.kernels import device
from mlxpool.worker.weights.load import LoadedModel

CLEAR_INTERVAL = 64  # passes after which freed buffers are given back: their sizes differ
WARM_UP_LENGTHS = (4, 32, 128)  # tokens of texts, as many as a pass takes
ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "": lambda x: x,
    "sigmoid": mx.sigmoid,
    "softmax": lambda x: mx.softmax(x, axis=-1),
}


class EncoderEngine:
    """The Encoder of a loaded model; used by one thread."""

    def __init__(
        self, encoder: EncoderFolder, loaded: LoadedModel, *, limit: int = 0, batch: int = 0
    ) -> None:
        """`limit` bounds the bytes of the process, see device.memory_limit; `batch` the tokens of a
        pass, see device.prefill_chunk.
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
        self._windows = [one.window if isinstance(one, KeyValueSpec) else 0 for one in caches]
        self._dense = [
            load_dense(encoder.folder.files / one.file, one, loaded.dtype)
            for one in encoder.vectors.dense
        ]
        self._passes = 0

    def encode(self, inputs: Sequence[EncoderInput]) -> npt.NDArray[np.float32]:
        """See Encoder.encode."""
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].ids))
        texts = [inputs[index] for index in order]
        types = chain.from_iterable(one.types or (0,) * len(one.ids) for one in texts)
        batch = PackedBatch(
            [len(one.ids) for one in texts], list(types), self._windows, causal=self._plan.causal
        )
        ids = mx.array(np.fromiter(chain.from_iterable(one.ids for one in texts), np.int32))
        found = np.array(self._answer(ids, batch).astype(mx.float32))
        self._passes += 1
        if self._passes % CLEAR_INTERVAL == 0:
            mx.clear_cache()
        result = np.empty_like(found)
        result[order] = found
        return result

    def _answer(self, ids: mx.array, batch: PackedBatch) -> mx.array:
        """The rows of the texts of a batch, in its order."""
        states = self._model.hidden_states(ids, batch)
        if "embed" not in self.tasks:
            logits = self._model.logits_of(pooled(states, batch.texts, (self._plan.pooling,)))
            return ACTIVATIONS[self._encoder.activation](logits.astype(mx.float32))
        vectors = pooled(states, batch.texts, self._encoder.vectors.poolings)
        for dense in self._dense:
            vectors = dense(vectors)
        return vectors

    def device_works(self) -> bool:
        """See Encoder.device_works."""
        return device.device_computes()

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """See Encoder.warm_up."""
        for length in WARM_UP_LENGTHS:
            length = min(length, self.context)
            self.encode([EncoderInput((0,) * length)] * max(self.lines // length, 1))
            on_progress()
        mx.clear_cache()

    def memory(self) -> MemoryUse:
        """See Encoder.memory."""
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
        """See Encoder.close."""
        self._dense.clear()
        del self._model, self._loaded
        mx.clear_cache()
