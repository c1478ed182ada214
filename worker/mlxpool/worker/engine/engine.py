"""The interface between the compute thread and an engine. No MLX."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.constraints.mask_table import MaskTable
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix_disk.folder import DiskSettings
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.block_manager import BlockManager
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.sequence import (
    PromptLogprobs,
    SampledToken,
    Sequence,
    SequenceFailed,
)
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import StepCost
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.speculation.mtp import Predictor

if TYPE_CHECKING:  # the import needs MLX
    from mlxpool.worker.engine.disk_prefixes import DiskPrefixes


class MemoryUse(Struct, frozen=True):
    """Bytes of memory in use; the fields from `weights` to `draft` are parts of `active`.

    A block that rows and prefixes share counts once, in `prefix`.
    """

    weights: int = 0
    kv: int = 0  # rows of running sequences
    kv_free: int = 0  # allocated for rows and unused
    prefix: int = 0  # entries of the prefix cache
    images: int = 0  # cached outputs of the image encoder
    draft: int = 0  # weights and rows of the draft model
    active: int = 0
    cache: int = 0  # freed buffers that MLX's allocator keeps
    peak: int = 0  # the peak of `active` since the last reading
    limit: int = 0  # the memory limit of the process; 0: unknown
    device_free: int = 0  # free memory of the machine or the GPU; 0: unknown


class HiddenStates(Struct, frozen=True):
    """Hidden states [count, d] of a span's inputs, after the last norm and before the LM head."""

    span: Span
    states: npt.NDArray[np.float32]


class StepResult(Struct, frozen=True):
    """The results of one pass; sequences that were released since its start have no results.

    `drawn`: one token of each sequence, or for a sequence with drafts, the accepted drafts and the
    next token. `failed`: the sequences whose logits were NaN; other sequences are not affected.
    `prompts`: the log-probabilities of prompts, for sequences that report them.
    """

    drawn: list[SampledToken]
    failed: list[SequenceFailed]
    hidden: tuple[HiddenStates, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()


class Engine(Protocol):
    """Computes steps of a loaded model. Used by one thread."""

    @property
    def context(self) -> int:
        """The most tokens of prompt and completion together."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def eos(self) -> frozenset[int]:
        """The token ids that end a completion."""

    @property
    def limits(self) -> StepLimits:
        """The limits of a pass: its most inputs, prompt chunks, query-key pairs and drafts."""

    @property
    def cost(self) -> StepCost:
        """The cost model of passes; `collect` and `warm_up` give it measured times."""

    @property
    def blocks(self) -> BlockManager:
        """The manager of KV blocks, which counts blocks and gives them to sequences."""

    @property
    def prefix(self) -> PrefixCache[Any] | None:
        """The prefix cache, for its counters; None: the engine keeps no prefixes."""

    @property
    def disk(self) -> DiskPrefixes | None:
        """The disk tier of the prefix cache; None: it does not exist or is not open."""

    def open_disk(self, settings: DiskSettings, wake: Callable[[], None]) -> None:
        """Opens the disk tier, after the warm-up.

        The tier's threads call `wake` after they have read or written something.

        Raises ModelLoadFailed if the engine has no disk tier or the folder cannot be used.
        """

    @property
    def digest(self) -> str:
        """A hash of everything that decides the tokens and the text of a request."""

    @property
    def layout(self) -> str:
        """The memory layout in a few words for operators; may be empty."""

    @property
    def no_drafts(self) -> str:
        """The reason why the engine checks no drafts, for operators; empty: it checks drafts."""

    @property
    def draft(self) -> DraftEngine | None:
        """The draft model, which runs beside the model; None: the engine has no draft model."""

    @property
    def predictor(self) -> Predictor | None:
        """The drafter that uses the model's MTP head; None: no head, or it is not loaded."""

    @property
    def yields_cores(self) -> bool:
        """True if steps may use fewer cores while other processes need them.

        False on a GPU, and if no bit of a result may depend on the number of cores.
        """

    def admit(self, seq: Sequence) -> None:
        """Gives the sequence a row, filled from the prefix cache.

        Sets `seq.cached` and `seq.submitted`.
        """

    def clip(self, seq: Sequence, tokens: int) -> int:
        """Returns the number of inputs of a prompt's next chunk, usually at most `tokens`.

        The number is at least 1, or 0 if the next input belongs to an image that is not encoded. A
        chunk ends at a restore point of the prefix cache, and before an image that is not encoded.
        A group of an image's inputs is not divided: a chunk that begins with a group may have more
        than `tokens` inputs.
        """

    @property
    def encoded(self) -> EncodedImages[Any]:
        """The cache of encoded images."""

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        """Computes the features of an image and keeps them in `encoded`.

        The features of `pinned` images are not evicted. Needs no row, and waits for the end of the
        computation.
        """

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Sets the function that this thread calls before it builds a pass that compiles kernels.

        Such a pass may take longer. The function is also called for passes of the model's own draft
        head.
        """

    def submit(self, spans: Many[Span]) -> bool:
        """Starts one pass over the spans; the device may still compute the previous pass.

        Adds the number of a span's inputs to `seq.submitted`, and the number of tokens that it
        draws to `seq.awaited`. Returns True if the pass compiles something; its time is then not
        representative. If the pass fails, all sequences in flight lose their rows. Raises
        ValueError for drafts of a sequence that has a pass in flight, or of a row that cannot be
        trimmed. Also raises ValueError for hidden states if the engine does not give these.
        """

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        """Starts a pass as `submit` does, but draws no tokens until `draw` is called.

        `draw` must be called before the next pass is submitted, and before this pass is collected.
        `built` is called when the pass is built, just before its submission to the device. The
        submission takes some time without the GIL. Returns True if the pass compiles something.
        Raises NotImplementedError if the engine draws tokens in the pass itself.
        """

    def draw(self, masks: RowMasks) -> None:
        """Draws the tokens of the newest pass, which `forward` started.

        A sequence in `masks` draws only tokens that its mask allows. A mask must allow at least one
        token; otherwise the sequence fails. Penalties also count the tokens that were collected
        after the call of `forward`. The caller may overwrite the table of the masks when the pass
        has ended.
        """

    def mask_memory(self, lines: int) -> MaskTable | None:
        """Returns host memory for at least `lines` masks, which the device reads directly.

        The caller keeps the memory and reuses it. None: the device cannot read the host's memory.
        """

    def drawn(self) -> list[SampledToken] | None:
        """Returns the tokens of the oldest pass in flight, if the host already knows them.

        `collect` returns them again. None: the device still computes the pass, or its state is
        unknown.
        """

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        """Takes a sequence out of the newest pass before the draw: the sequence gets no token.

        With `again`, the sequence also gives up its last input, and a later pass reads that input
        again. Without `again`, the sequence keeps its inputs, because its next tokens are already
        known. In both cases it gives up its drafts.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight, and returns its results.

        The caller appends the tokens to `seq.ids`. Removes wrong drafts from the rows, and lowers
        `seq.submitted` accordingly. If the pass fails, all sequences in flight lose their rows.
        """

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Trims a running sequence's row to its first `count` inputs; other inputs can then follow.

        The sequence must not be in a pass in flight. Returns False and changes nothing if the row
        cannot be trimmed.
        """

    def lost(self, seq: Sequence) -> bool:
        """Returns True if a failed pass has lost inputs of a running sequence."""

    @property
    def in_flight(self) -> int:
        """The number of passes that were submitted and not collected."""

    def release(self, seq: Sequence) -> None:
        """Frees row and blocks of a sequence in any phase; ignores an unknown sequence."""

    def reserve(self, size: int) -> None:
        """Reserves `size` bytes of the memory limit for other processes.

        The reservation replaces the earlier one.
        """

    def make_room(self, size: int) -> None:
        """Frees `size` bytes, or as many as possible, of freed buffers, cached prefixes and images.

        The memory that running sequences need stays.
        """

    def device_works(self) -> bool:
        """Returns True if the device still computes; called after an exception.

        After some GPU errors every later call of the process fails.
        """

    def expect_drafts(self, most: int) -> None:
        """Sets, before the warm-up, the most drafts that the rows of a pass check together.

        The warm-up then also computes passes that check drafts, and the memory budget includes the
        draws of these passes.
        """

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """Computes each kind of step once, so that no request waits for compilation.

        Calls `on_progress` after each step, which may take seconds.
        """

    def memory(self) -> MemoryUse:
        """Returns the memory in use."""

    def kv_use(self) -> tuple[int, int]:
        """Returns the numbers of tokens and of bytes in the rows of running sequences."""

    def piece(self, token: int) -> bytes:
        """Returns the text of a token as bytes."""

    def close(self) -> None:
        """Frees all rows and arrays."""
