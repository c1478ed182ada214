"""The model that counts: no weights, no GPU, no MLX, and every token known beforehand.

Token i of a completion is f(prompt, seed, i):

    f = splitmix64(crc32(prompt ids as little-endian u32) ^ splitmix64(seed + i * GOLDEN)) % vocab

with 64-bit wrap-around. A prompt's ids are its UTF-8 bytes; the text of an id is its decimal
digits and a space. So a checker can verify every token of every stream after any fault.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from mlxpool.common.config.schema import Counting
from mlxpool.common.protocol.chat import joined
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.engine.interface import Memory, Share
from mlxpool.worker.prompt.interface import Fits, Prompt, any_size
from mlxpool.worker.scheduling.sequence import Drawn, Logprob, Sequence

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
BYTES_PER_TOKEN = 1024  # what a token's keys and values count for in its memory report
CONTEXT = 131_072
CHUNK = 2048
LOAD_STEPS = 10
BLOCKS = 2**40  # it takes no memory, so there is always more


def splitmix64(value: int) -> int:
    """The finaliser of SplitMix64 on a 64-bit value."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def token_at(prompt: Seq[int], seed: int, position: int, vocab: int) -> int:
    """The token id that the model draws at a position of the completion."""
    root = zlib.crc32(pack_ids(prompt))
    return splitmix64(root ^ splitmix64(seed + position * GOLDEN)) % vocab


def piece(token: int) -> bytes:
    """The text of an id."""
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
        self.blocks = BLOCKS
        self.rows: list[Sequence] = []

    def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Take `load_ms` in ten shards."""
        for shard in range(LOAD_STEPS):
            time.sleep(self.settings.load_ms / 1000 / LOAD_STEPS)
            on_progress(shard + 1, self.settings.load_bytes * (shard + 1) // LOAD_STEPS)

    layout = ""

    def admit(self, seq: Sequence) -> None:
        self.rows.append(seq)

    def joint(self, shares: Seq[Share]) -> int:
        alone = (number for number, (seq, _) in enumerate(shares) if seq.suspect)
        return max(1, min(self.settings.joint, next(alone, len(shares))))

    def prefill_all(self, shares: Seq[Share]) -> list[int]:
        done = [
            max(0, min(budget, self.chunk, seq.length - 1 - seq.prefilled))
            for seq, budget in shares
        ]
        time.sleep(sum(done) * self.settings.prefill_us / 1e6)
        for (seq, _), count in zip(shares, done, strict=True):
            seq.prefilled += count
        return done

    def decode(self, rows: Seq[Sequence]) -> list[Drawn]:
        time.sleep(self.settings.step_us / 1e6)
        return [self._draw(row) for row in rows]

    def _draw(self, row: Sequence) -> Drawn:
        token = token_at(row.prompt, row.seed, len(row.ids), self.vocab_size)
        top = tuple((token, 0.0) for _ in range(min(1, row.options.top_logprobs)))
        logprob = Logprob(0.0, top) if row.options.logprobs else None
        return Drawn(row, token, logprob)

    def release(self, seq: Sequence) -> None:
        if seq in self.rows:
            self.rows.remove(seq)

    @property
    def yields_cores(self) -> bool:
        return False

    def ahead(self) -> bool:
        return False

    def sound(self) -> bool:
        return True

    def prefix_blocks(self) -> int:
        return 0

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        return 0

    def warm_up(self, moved: Callable[[], None]) -> None:
        """Nothing is slower the first time."""

    def memory(self) -> Memory:
        kv = sum(row.length for row in self.rows) * BYTES_PER_TOKEN
        weights = self.settings.load_bytes
        return Memory(weights=weights, kv=kv, active=weights + kv, peak=weights + kv)

    def piece(self, token: int) -> bytes:
        return piece(token)

    def close(self) -> None:
        self.rows.clear()


class CountingText:
    """The tokenizer of the counting model: bytes are ids."""

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    def encode(self, text: str, fits: Fits = any_size) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        fits(len(data))
        return list(data)

    def decode(self, ids: Seq[int]) -> str:
        return b"".join(map(piece, ids)).decode()

    def piece(self, token: int) -> bytes:
        return piece(token)

    def chat(
        self,
        messages: Seq[dict[str, Any]],
        tools: object,
        now: float,
        fits: Fits = any_size,
        think: object = None,
    ) -> Prompt:
        """One line for each message; it has no thoughts."""
        lines = [f"{m['role']}: {joined(m.get('content'))}\n" for m in messages]
        return Prompt(self.encode("".join(lines), fits))
