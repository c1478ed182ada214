"""The engine of our own model code: its memory, its passes in flight, and its warm-up."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many

import mlx.core as mx

from mlxpool.worker import versions
from mlxpool.worker.attention.row_spans import CacheRow
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.constraints.mask_table import MaskTable
from mlxpool.worker.engine.devices import OneDevice
from mlxpool.worker.engine.disk_prefixes import DiskPrefixes
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.engine.inspection import Inspection
from mlxpool.worker.engine.mask_tables import MaskTables
from mlxpool.worker.engine.opening import (
    Parts,
    Warmed,
    expect_drafts,
    kept_rules,
    limits_of,
    open_parts,
)
from mlxpool.worker.engine.pipeline import Pipeline
from mlxpool.worker.engine.settings import DEFAULTS, EngineSettings
from mlxpool.worker.engine.warm_up import warm_up
from mlxpool.worker.kernels import device
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix_disk.folder import DiskSettings
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.speculation.mtp import Predictor
from mlxpool.worker.weights.load import LoadedModel


class ModelEngine:
    """The Engine of a loaded model; used by one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        text: ChatTokenizer | TokenTable | None = None,
        settings: EngineSettings = DEFAULTS,
        *,
        draft: DraftEngine | None = None,
        devices: OneDevice | None = None,
        make_pipeline: Callable[[Parts], Pipeline] = Pipeline,
    ) -> None:
        """`draft`: the draft model, which is warmed up and closed with this engine.

        `text`: the tokenizer; None: the tokenizer of the folder. `devices`: the devices that
        compute the passes; None: one device computes them.
        """
        folder = loaded.folder
        self.parts = open_parts(loaded, settings, devices, draft)
        self.pipeline = make_pipeline(self.parts)
        self.masks = MaskTables(folder.plan.vocab_size)
        self.limits = limits_of(self.parts, Warmed(self.parts.target.most))
        self.most_drafts = 0  # the most drafts of a pass; 0: no pass checks drafts
        self.context = self.parts.memory.context
        self.vocab_size = folder.plan.vocab_size
        self.eos = folder.eos_ids
        self.digest = versions.digest_of(folder.digest, settings.kv)
        self.blocks, self.encoded = self.parts.memory.blocks, self.parts.memory.encoded
        self.draft, self.cost = draft, self.pipeline.times.cost
        self._text = text or ChatTokenizer.from_folder(folder)
        self._passes = self.parts.devices.passes(self.pipeline)

    def inspect(self) -> Inspection:
        """Returns the parts of this engine that tests read."""
        memory = self.parts.memory
        return Inspection(
            memory, memory.layout, memory.rows, tuple(self.pipeline.flights), memory.budget
        )

    # ---- properties ------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """The memory layout in a few words for operators; see Engine."""
        name, kv = self.parts.memory.layout.name, self.parts.shape.kv
        return name if kv == AUTO else f"{name}, {kv}"

    @property
    def no_drafts(self) -> str:
        """The reason why the engine checks no drafts, for operators; see Engine."""
        return self.parts.no_drafts

    @property
    def predictor(self) -> Predictor | None:
        """The drafter that uses the model's MTP head; see Engine."""
        return self.parts.predictions

    @property
    def yields_cores(self) -> bool:
        """True if steps may use fewer cores while other processes need them; see Engine."""
        return not device.on_gpu() and not self.parts.loaded.deterministic

    @property
    def prefix(self) -> PrefixCache[CacheRow]:
        """The prefix cache, for its counters; see Engine."""
        return self.parts.memory.prefix

    @property
    def disk(self) -> DiskPrefixes | None:
        """The disk tier of the prefix cache; see Engine."""
        return self.parts.memory.disk

    @property
    def in_flight(self) -> int:
        """The number of passes that were submitted and not collected; see Engine."""
        return len(self.pipeline.flights)

    # ---- the load and the end --------------------------------------------------------------------

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Sets the function to call before a pass that compiles kernels is built; see Engine."""
        self.parts.memory.layout.notice.tell = tell
        if self.parts.predictions is not None:
            self.parts.predictions.notice.tell = tell

    def expect_drafts(self, most: int) -> None:
        """Sets the most drafts that the rows of a pass check together; see Engine."""
        self.most_drafts = most
        expect_drafts(self.parts, most)

    def warm_up(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Computes each kind of step once, so that no request waits for compilation; see Engine."""
        self.limits = limits_of(self.parts, warm_up(self, on_progress))

    def open_disk(self, settings: DiskSettings, wake: Callable[[], None]) -> None:
        """Opens the disk tier, after the warm-up; see Engine."""
        rules = {**kept_rules(self.parts), "weights": self.digest}
        self.parts.memory.open_disk(settings, wake, self.parts.loaded.folder, rules)

    def close(self) -> None:
        """Frees all rows and arrays; see Engine."""
        self.pipeline.flights.clear()
        self.parts.memory.close()

    # ---- sequences -------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> None:
        """Gives the sequence a row, filled from the prefix cache; see Engine."""
        self.pipeline.rows.admit(seq)

    def clip(self, seq: Sequence, tokens: int) -> int:
        """Returns the number of inputs of a prompt's next chunk; see Engine."""
        return self.pipeline.rows.clip(seq, tokens)

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        """Computes the features of an image and keeps them in `encoded`; see Engine."""
        if self.parts.image_encoder is None:
            raise NotImplementedError("the model reads no images")
        features = self.parts.image_encoder(image)
        mx.eval(features)
        self.encoded.put(image.key, features, pinned)

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Trims a running sequence's row to its first `count` inputs; see Engine."""
        return self.pipeline.rewind(seq, count)

    def lost(self, seq: Sequence) -> bool:
        """Returns True if a failed pass has lost inputs of a running sequence; see Engine."""
        return self.pipeline.rows.lost(seq)

    def release(self, seq: Sequence) -> None:
        """Frees row and blocks of a sequence in any phase; see Engine."""
        self.pipeline.release(seq)

    def piece(self, token: int) -> bytes:
        """Returns the text of a token as bytes; see Engine."""
        return self._text.piece(token)

    # ---- passes ----------------------------------------------------------------------------------

    def submit(self, spans: Many[Span]) -> bool:
        """Starts one pass over the spans; see Engine."""
        return self._passes.start(spans, at_once=True)

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        """Starts a pass that draws no tokens until `draw` is called; see Engine."""
        return self._passes.start(spans, at_once=False, built=built)

    def draw(self, masks: RowMasks) -> None:
        """Draws the tokens of the pass that `forward` started; see Engine."""
        self.pipeline.draw(masks)

    def mask_memory(self, lines: int) -> MaskTable | None:
        """Returns memory for masks that the device reads directly; see Engine."""
        if self.parts.uploads is None:
            return None
        return self.masks.take(lines, self.parts.memory.most_rows())

    def drawn(self) -> list[SampledToken] | None:
        """Returns the tokens of the oldest pass in flight, if already known; see Engine."""
        return self.pipeline.drawn()

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        """Takes a sequence out of the newest pass before the draw; see Engine."""
        self.pipeline.withdraw(seq, again=again)

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight; see Engine."""
        return self._passes.collect()

    def device_works(self) -> bool:
        """Returns True if the device still computes; see Engine."""
        return self.parts.devices.work()

    # ---- memory ----------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Reserves `size` bytes of the memory limit for other processes, in total; see Engine."""
        self.parts.memory.reserve(size)

    def make_room(self, size: int) -> None:
        """Frees memory that running sequences do not need; see Engine."""
        self.parts.memory.make_room(size)

    def memory(self) -> MemoryUse:
        """Returns the memory in use; see Engine."""
        return self.parts.devices.used(self.parts.memory.use())

    def kv_use(self) -> tuple[int, int]:
        """Returns the numbers of tokens and of bytes in the rows of running sequences.

        See Engine.
        """
        return self.parts.memory.kv_use()
