"""An engine of mlx-lm's model code: computes one sequence at a time, each with its own caches.

Only this module imports mlx-lm, and only if a worker loads such a model.
"""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.options import Options
from mlxpool.worker import versions
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.constraints.mask_table import MaskTable
from mlxpool.worker.engine.disk_prefixes import DiskPrefixes
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.engine.flight import Flight, PassTimes
from mlxpool.worker.engine.inspection import Inspection
from mlxpool.worker.engine.memory import EngineMemory
from mlxpool.worker.engine.rows import Rows
from mlxpool.worker.engine.settings import DEFAULTS, EngineSettings
from mlxpool.worker.kernels import device
from mlxpool.worker.kernels.compiled_passes import ComputedKinds
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey
from mlxpool.worker.mlx_lm.rows import MlxLmLayout, MlxLmRow, class_name, flatten
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.modes import make_prefix_cache
from mlxpool.worker.prefix_disk.folder import DiskSettings
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import (
    SampleRequest,
    SamplerOutput,
    penalty_history,
)
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, activation_bytes, blocks_for
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span, require_plain
from mlxpool.worker.scheduling.step_cost import SLOW_STEP_TARGET, StepCost
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.load import OnProgress
from mlxpool.worker.weights.mlx_lm_models import cache_kinds_of

TENSORS_PER_REPORT = 16  # tensors between two progress reports
CODE_FIELD = "model_file"  # key of config.json
# Tokens of the chunks that are measured at load.
WARM_UP_CHUNKS = (KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS)


@contextmanager
def open_file_limit_kept() -> Iterator[None]:
    """A context in which the limit of open files stays: the import of mlx-lm would lower it."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *wanted: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def load(folder: ModelFolder, on_progress: OnProgress = lambda tensors, size: None) -> Any:
    """Loads mlx-lm's model with its weights; on the CPU it computes in float32.

    Raises ModelLoadFailed if config.json names Python code of the model, which is never run. If
    mlx-lm fails, raises ModelLoadFailed with mlx-lm's message.
    """
    if CODE_FIELD in folder.config:  # some versions of mlx-lm run this code
        raise ModelLoadFailed(
            f"{folder.path}: {CODE_FIELD} in config.json names Python code of the folder,"
            f" {folder.config[CODE_FIELD]!r:.80}, which is never run: remove it to load the model"
            f" with mlx-lm's own code for model_type {folder.model_type!r}"
        )
    LOAD.enter("weights")
    with open_file_limit_kept():
        from mlx_lm.utils import load_model
    from mlx.utils import tree_flatten

    try:
        model, _ = load_model(folder.path, lazy=True)
    except Exception as error:  # the code of a model may raise any exception
        raise ModelLoadFailed(
            f"{folder.path}: mlx-lm cannot load model_type {folder.model_type!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not device.on_gpu():
        model.set_dtype(mx.float32)
    weights = [array for _, array in tree_flatten(model.parameters())]
    whole = max(1, sum(array.nbytes for array in weights))
    for end in range(TENSORS_PER_REPORT, len(weights) + TENSORS_PER_REPORT, TENSORS_PER_REPORT):
        try:
            mx.eval(*weights[end - TENSORS_PER_REPORT : end])
        except (RuntimeError, OSError) as error:
            raise ModelLoadFailed(f"{folder.path} cannot be read: {error}") from error
        share = sum(array.nbytes for array in weights[:end]) / whole
        on_progress(len(weights[:end]), round(share * folder.weight_bytes))
    return model


class MlxLmEngine:
    """The Engine of a model that mlx-lm's code computes; used by one thread."""

    layout = "mlx-lm's code"
    no_drafts = "mlx-lm's code computes this model, and checks no drafts"
    draft = None
    predictor = None

    def __init__(
        self,
        model: Any,
        folder: ModelFolder,
        text: ChatTokenizer | TokenTable | None = None,
        settings: EngineSettings = DEFAULTS,
    ) -> None:
        """If `text` is None, the tokenizer of the folder is used."""
        from mlx.utils import tree_flatten
        from mlx_lm.models.cache import make_prompt_cache

        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        self._new_row = partial(MlxLmRow, partial(make_prompt_cache, model))
        kinds = cache_kinds_of(class_name(cache) for cache in flatten(self._new_row().caches))
        mode = "off" if kinds is None else settings.prefix
        self._memory: EngineMemory[MlxLmLayout, MlxLmRow] = EngineMemory(folder, weights, settings)
        self._rows = Rows(self._memory)
        store = RowStore(self._new_row, kinds or ())
        self._memory.layout = MlxLmLayout(store)
        self._memory.prefix = make_prefix_cache(
            mode, store, self._memory.prefix_bytes, by_owner=settings.by_owner
        )
        self._memory.set_capacity()
        self._model, self._folder = model, folder
        self._text = text or ChatTokenizer.from_folder(folder)
        self._times = PassTimes()
        self._flights: deque[Flight] = deque()
        self._kinds = ComputedKinds()  # sizes of spans and of sampled rows
        self._tell_compiles: Callable[[], None] = lambda: None
        self.digest = versions.digest_of(folder.digest)
        self.blocks = self._memory.blocks
        chunk = min(device.prefill_chunk(settings.batch), self.context)
        self.limits = StepLimits(  # a pass computes span by span, so it reads one prompt
            chunk,
            pair_budget(chunk),
            self.context,
            seconds=settings.step_target or SLOW_STEP_TARGET,
            prompts=1,
        )

    @property
    def context(self) -> int:
        """The most tokens of prompt and completion together; see Engine."""
        return self._memory.context

    @property
    def vocab_size(self) -> int:
        """The number of token ids; see Engine."""
        return self._folder.plan.vocab_size

    @property
    def eos(self) -> frozenset[int]:
        """The token ids that end a completion; see Engine."""
        return self._folder.eos_ids

    @property
    def cost(self) -> StepCost:
        """The cost model of passes; see Engine."""
        return self._times.cost

    @property
    def prefix(self) -> PrefixCache[MlxLmRow]:
        """The prefix cache, for its counters; see Engine."""
        return self._memory.prefix

    @property
    def disk(self) -> DiskPrefixes | None:
        """The disk tier of the prefix cache; see Engine."""
        return self._memory.disk

    def open_disk(self, settings: DiskSettings, wake: Callable[[], None]) -> None:
        """Opens the disk tier, after the warm-up; see Engine."""
        rules = {"layout": self.layout, "mlx_lm": version("mlx-lm"), "weights": self.digest}
        self._memory.open_disk(settings, wake, self._folder, rules)

    @property
    def yields_cores(self) -> bool:
        """True if steps may use fewer cores while other processes need them; see Engine."""
        return not device.on_gpu()

    @property
    def encoded(self) -> EncodedImages[Any]:
        """The cache of encoded images; see Engine."""
        return self._memory.encoded

    @property
    def in_flight(self) -> int:
        """The number of passes that were submitted and not collected; see Engine."""
        return len(self._flights)

    def inspect(self) -> Inspection:
        """Returns the parts of this engine that tests read."""
        memory = self._memory
        return Inspection(memory, memory.layout, memory.rows, tuple(self._flights), memory.budget)

    def admit(self, seq: Sequence) -> None:
        """Gives the sequence a row, filled from the prefix cache; see Engine."""
        self._rows.admit(seq)

    def clip(self, seq: Sequence, tokens: int) -> int:
        """Returns the number of inputs of a prompt's next chunk, at most `tokens`; see Engine."""
        return self._rows.clip(seq, tokens)

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        """Raises NotImplementedError: the engine reads no images."""
        raise NotImplementedError("the model reads no images")

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Sets the function to call before a pass that compiles kernels; see Engine."""
        self._tell_compiles = tell

    def submit(self, spans: Many[Span]) -> bool:
        """Starts one pass over the spans; see Engine.

        Computes the spans one after the other, and waits for the end of each chunk of a prompt.
        """
        began = monotonic()
        require_plain(spans, "an engine of mlx-lm's code")
        # A list, not a generator: `is_new` has to be called for all spans.
        fresh = any([self._kinds.is_new(kind) for kind in _kinds_of(spans)])
        if fresh:
            self._tell_compiles()
        with self._discard_on_failure(spans):
            keep = [span for span in spans if self._rows.at_restore_point(span)]
            logits = [self._computed(span) for span in spans]
            drawn = [line for line, span in zip(logits, spans, strict=True) if span.draws]
            rows = [span.sequence for span in spans if span.draws]
            sampled = self._drawn(rows, mx.concatenate(drawn)) if rows else None
            self._rows.submitted(spans, keep)
        arrays = tuple(
            array for span in spans for array in self._memory.rows[span.sequence].arrays()
        )
        order = {seq: row for row, seq in enumerate(rows)}
        done = arrays if sampled is None else (*arrays, *sampled.arrays())
        self._flights.append(Flight(tuple(spans), order, sampled, done, began, fresh))
        return fresh

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight; see Engine."""
        flight = self._flights[0]
        with self._discard_on_failure(flight.spans):
            mx.eval(*flight.done)
            self._flights.popleft()
            self._kinds.evaluated()  # no pass is submitted ahead
            self._times.ended(flight, monotonic())
            for seq in flight.rows:
                seq.awaited -= 1
            return flight.result()

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        """Raises NotImplementedError: `submit` draws tokens in the pass itself."""
        raise NotImplementedError("mlx-lm's code draws tokens in the pass itself")

    def draw(self, masks: RowMasks) -> None:
        """Raises NotImplementedError: `submit` has drawn the tokens."""
        raise NotImplementedError("mlx-lm's code draws tokens in the pass itself")

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        """Raises NotImplementedError: `submit` has drawn the tokens."""
        raise NotImplementedError("mlx-lm's code draws tokens in the pass itself")

    def mask_memory(self, lines: int) -> MaskTable | None:
        """Returns None: the engine draws without masks."""
        return None

    def drawn(self) -> list[SampledToken] | None:
        """Returns None: the host gets tokens only from `collect`."""
        return None

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Returns False: the engine trims no rows."""
        return False

    def lost(self, seq: Sequence) -> bool:
        """Returns True if a failed pass has lost inputs of a running sequence; see Engine."""
        return self._rows.lost(seq)

    def release(self, seq: Sequence) -> None:
        """Frees row and blocks of a sequence in any phase; see Engine."""
        self._flights = deque(flight.without(seq) for flight in self._flights)
        self._rows.release(seq)

    def reserve(self, size: int) -> None:
        """Reserves `size` bytes of the memory limit for other processes, in total; see Engine."""
        self._memory.reserve(size)

    def make_room(self, size: int) -> None:
        """Frees memory that running sequences do not need; see Engine."""
        self._memory.make_room(size)

    def device_works(self) -> bool:
        """Returns True if the device still computes; see Engine."""
        return device.device_computes()

    def memory(self) -> MemoryUse:
        """Returns the memory in use; see Engine."""
        return self._memory.use()

    def kv_use(self) -> tuple[int, int]:
        """Returns the numbers of tokens and of bytes in the rows of running sequences.

        See Engine.
        """
        return self._memory.kv_use()

    def piece(self, token: int) -> bytes:
        """Returns the text of a token as bytes; see Engine."""
        return self._text.piece(token)

    def close(self) -> None:
        """Frees all rows and arrays; see Engine."""
        self._flights.clear()
        self._memory.close()

    def _computed(self, span: Span) -> mx.array:
        """Returns logits [1, vocabulary] after the last input of a span."""
        row = self._memory.rows[span.sequence]
        assert row.offset == span.start, f"a row of {row.offset} tokens, a span at {span.start}"
        ids = mx.array([span.sequence.token_range(span.start, span.end)], dtype=mx.int32)
        logits: mx.array = self._model(ids, cache=row.caches)[:, -1, : self.vocab_size]
        row.advance(span.count)
        if not span.decodes:
            mx.eval(row.arrays())
        return logits

    def _drawn(self, rows: Many[Sequence], logits: mx.array) -> SamplerOutput:
        requests = [
            SampleRequest(seq.options, seq.seed, len(seq.ids), penalty_history(seq), seq.scored)
            for seq in rows
        ]
        return sampler.sample(logits, requests)

    @contextmanager
    def _discard_on_failure(self, spans: Many[Span]) -> Iterator[None]:
        """Frees the KV rows of these spans if the wrapped pass fails.

        The failed pass may have changed the rows.
        """
        try:
            yield
        except Exception:
            self._flights.clear()
            self._kinds.failed()
            for span in spans:
                if span.sequence in self._memory.rows:
                    self._memory.rows[span.sequence].release()
            raise

    def expect_drafts(self, most: int) -> None:
        """Does nothing: this engine checks no drafts."""

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Measures the size of mlx-lm's caches, which grow by blocks; see Engine.warm_up."""
        context, chunk = self.context, self.limits.lines
        small, large = (self._measure_row(min(n, context - 2), on_progress) for n in WARM_UP_CHUNKS)
        grown, more = large[1] - small[1], blocks_for(large[0]) - blocks_for(small[0])
        block = max(1, grown // more if more else small[1])
        row, step = max(0, small[1] - block), 0
        if small[0] < large[0]:
            chunks = (small[0], small[2]), (large[0], large[2])
            step = activation_bytes(*chunks, chunk, pair_budget(chunk))
        memory = self._memory
        memory.layout.fixed = row
        memory.budget = replace(memory.budget, block=block, row=row, step=step)
        memory.finish_warm_up()

    def _measure_row(self, size: int, on_progress: Callable[[], None]) -> tuple[int, int, int]:
        """Computes a chunk of `size` tokens and a decode step.

        Returns the tokens of the chunk, the bytes of the row and the peak bytes of the chunk.
        """
        seq = Sequence(b"", 0, (0,) * (max(size, 1) + 1), Options(), 0, 1)
        row = self._memory.rows[seq] = self._new_row()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self.submit([Span(seq, 0, size, draws=0)])
        self.collect()
        peak, taken = mx.get_peak_memory() - before, row.nbytes
        self.submit([Span(seq, seq.submitted, 1, draws=1)])
        self.collect()
        on_progress()
        del self._memory.rows[seq]
        return size, taken, peak


def _kinds_of(spans: Many[Span]) -> set[tuple[int, int]]:
    """Returns the size classes of the spans, and of the number of rows that draw tokens.

    A class is a power of two. There are only a few classes, because kernels are compiled for each
    class.
    """
    kinds = {((span.count - 1).bit_length(), 0) for span in spans}
    kinds.add((0, sum([span.draws for span in spans]).bit_length()))
    return kinds
