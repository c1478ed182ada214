"""The counting model, a test model without weights and MLX: a formula gives its tokens.

Token i of a completion is f(prompt, seed, i):

    f = splitmix64(crc32(prompt ids as little-endian u32) ^ splitmix64(seed + i * GOLDEN)) % vocab

with 64-bit wrap-around. The ids of a prompt are its UTF-8 bytes; the text of an id is its decimal
digits and a space. A checker can therefore verify every token of a stream after any fault.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Many
from typing import Any

from mlxpool.common.config.schema import Counting
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.chat import joined
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.constraints.mask_table import MaskTable
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey
from mlxpool.worker.prompt.infill import NO_INFILL
from mlxpool.worker.prompt.text_model import RenderedChat
from mlxpool.worker.sampling.row_masks import RowMasks
from mlxpool.worker.scheduling.block_manager import BlockManager
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.sequence import (
    PromptLogprobs,
    SampledToken,
    Sequence,
    TokenLogprob,
)
from mlxpool.worker.scheduling.spans import Span, require_plain
from mlxpool.worker.scheduling.step_cost import SLOW_STEP_TARGET, Load, StepCost

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
BYTES_PER_TOKEN = 1024  # bytes of keys and values of a token, in the memory report
CONTEXT = 131_072
CHUNK = 2048
LOAD_STEPS = 10
UNLIMITED_BLOCKS = 2**40  # more blocks than sequences can need; blocks use no memory


def splitmix64(value: int) -> int:
    """Returns the finaliser of SplitMix64 on a 64-bit value."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def token_at(prompt: Many[int], seed: int, position: int, vocab: int) -> int:
    """Returns the token id at a position of the completion."""
    root = zlib.crc32(pack_ids(prompt))
    return splitmix64(root ^ splitmix64(seed + position * GOLDEN)) % vocab


def piece(token: int) -> bytes:
    """Returns the text of an id."""
    return b"%d " % token


class CountingEngine:
    """An `Engine` that sleeps instead of computing."""

    def __init__(self, settings: Counting, context: int) -> None:
        self.settings = settings
        self.context = context or CONTEXT
        self.vocab_size = settings.vocab
        self.eos: frozenset[int] = frozenset()
        self.chunk = min(CHUNK, self.context)
        self.digest = f"counting-{settings.vocab}"
        self.blocks = BlockManager(self, UNLIMITED_BLOCKS)
        self.rows: list[Sequence] = []
        self.flights: list[tuple[Span, ...]] = []
        self.cost = StepCost()

    def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Sleeps `load_ms` milliseconds in LOAD_STEPS steps, instead of loading."""
        for shard in range(LOAD_STEPS):
            time.sleep(self.settings.load_ms / 1000 / LOAD_STEPS)
            on_progress(shard + 1, self.settings.load_bytes * (shard + 1) // LOAD_STEPS)

    layout = ""
    no_drafts = "the counting model cannot check drafts"
    draft = None
    predictor = None
    prefix = None
    disk = None
    encoded: EncodedImages[Any] = EncodedImages(0)  # the model reads no images

    def open_disk(self, settings: object, wake: Callable[[], None]) -> None:
        raise NotImplementedError("the counting model keeps no prefixes")

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        raise NotImplementedError("the counting model reads no images")

    def admit(self, seq: Sequence) -> None:
        self.rows.append(seq)

    @property
    def limits(self) -> StepLimits:
        lines = self.chunk + len(self.rows)
        return StepLimits(
            lines,
            pair_budget(self.chunk),
            self.context,
            seconds=SLOW_STEP_TARGET,
            prompts=self.settings.joint,
        )

    def clip(self, seq: Sequence, tokens: int) -> int:
        return tokens - (seq.reports and seq.submitted + tokens == seq.length)

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """Does nothing: its passes compile nothing."""

    def submit(self, spans: Many[Span]) -> bool:
        require_plain([span for span in spans if not span.sequence.reports], "the counting model")
        for span in spans:
            seq = span.sequence
            context = self.context if seq.shift is None else seq.shift.context
            assert span.end <= context, f"{span.end} inputs in a context of {context}"
            seq.submitted = span.end
            seq.awaited += span.draws
        self.flights.append(tuple(spans))
        return False

    def collect(self) -> StepResult:
        spans = self.flights.pop(0)
        read = sum(span.count for span in spans if not span.decodes)
        seconds = read * self.settings.prefill_us / 1e6
        if any(span.draws for span in spans):
            seconds += self.settings.step_us / 1e6
        time.sleep(seconds)
        self.cost.observe(Load.of(spans), seconds)
        drawing = [s.sequence for s in spans if s.draws and s.sequence in self.rows]
        for seq in drawing:
            seq.awaited -= 1
        prompts = [_reported(s) for s in spans if s.hidden and s.sequence in self.rows]
        return StepResult([self._draw(seq) for seq in drawing], [], prompts=tuple(prompts))

    def forward(self, spans: Many[Span], built: Callable[[], None] = lambda: None) -> bool:
        raise NotImplementedError("the counting model draws tokens in the pass itself")

    def draw(self, masks: RowMasks) -> None:
        raise NotImplementedError("the counting model draws tokens in the pass itself")

    def mask_memory(self, lines: int) -> MaskTable | None:
        return None

    def drawn(self) -> list[SampledToken] | None:
        return None

    def withdraw(self, seq: Sequence, *, again: bool) -> None:
        raise NotImplementedError("the counting model draws tokens in the pass itself")

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    def rewind(self, seq: Sequence, count: int) -> bool:
        """Returns False: the counting model cannot trim rows."""
        return False

    def lost(self, seq: Sequence) -> bool:
        return False

    def _draw(self, row: Sequence) -> SampledToken:
        token = token_at(row.prompt, row.seed, len(row.ids), self.vocab_size)
        top = tuple((token, 0.0) for _ in range(min(1, row.options.top_logprobs)))
        logprob = TokenLogprob(0.0, top) if row.options.logprobs else None
        return SampledToken(row, token, logprob)

    def release(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        if seq in self.rows:
            self.rows.remove(seq)

    @property
    def yields_cores(self) -> bool:
        return False

    def device_works(self) -> bool:
        return True

    def blocks_in_use(self) -> int:
        return 0

    def blocks_of(self, seq: Sequence) -> int:
        return 0

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        return 0

    def unpin(self, seq: Sequence) -> bool:
        return False

    def reserve(self, size: int) -> None:
        """Does nothing: its memory is not limited."""

    def make_room(self, size: int) -> None:
        """Does nothing: it keeps no memory that it could free."""

    def expect_drafts(self, most: int) -> None:
        """Does nothing: it checks no drafts."""

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        """Does nothing: its first step is as fast as later steps."""

    def kv_use(self) -> tuple[int, int]:
        tokens = sum(row.length for row in self.rows)
        return tokens, tokens * BYTES_PER_TOKEN

    def memory(self) -> MemoryUse:
        kv = self.kv_use()[1]
        weights = self.settings.load_bytes
        return MemoryUse(weights=weights, kv=kv, active=weights + kv, peak=weights + kv)

    def piece(self, token: int) -> bytes:
        return piece(token)

    def close(self) -> None:
        self.rows.clear()


def prompt_logprob(token: int) -> float:
    """Returns the log-probability that the model reports for a token of a prompt."""
    return -token / 256


def _reported(span: Span) -> PromptLogprobs:
    """Returns log-probabilities of a span's prompt tokens; a token's only alternative is itself."""
    seq = span.sequence
    begin, top = max(span.start + 1, seq.reported), min(1, seq.options.prompt_alternatives)
    ids = seq.prompt[begin : span.end + 1]
    pairs = [(token, prompt_logprob(token)) for token in ids]
    return PromptLogprobs(seq, begin, tuple(TokenLogprob(pair[1], (pair,) * top) for pair in pairs))


class CountingText:
    """The tokenizer of the counting model, without a chat template: an id is a byte."""

    max_bytes_per_token: int | None = None  # prompts are cheap to encode
    images = None
    controls: tuple[Many[str], Many[str]] = ((), ())

    def infill(self, text: str, suffix: str) -> list[int]:
        raise BadRequest(NO_INFILL)

    def read_image(self, data: bytes, index: int) -> PreparedImage:
        raise NotImplementedError("the counting model reads no images")

    def encode(self, text: str, cuts: Many[int] = (), *, begins: bool = True) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Many[int]) -> str:
        return b"".join(map(piece, ids)).decode()

    def piece(self, token: int) -> bytes:
        return piece(token)

    def render(
        self,
        messages: Many[Mapping[str, Any]],
        tools: Many[Mapping[str, Any]],
        now: float,
        think: bool | str | None,
        *,
        continues: bool = False,
    ) -> RenderedChat:
        """Returns one line of text for each message, without thoughts.

        Raises BadRequest for tools.
        """
        if tools:
            raise BadRequest("the model counting knows no tools: leave `tools` out")
        lines = [f"{m['role']}: {joined(m.get('content'))}\n" for m in messages]
        return RenderedChat("".join(lines))

    def restore_at(self, text: str, messages_end: int, ids: Many[int]) -> int:
        return 0
