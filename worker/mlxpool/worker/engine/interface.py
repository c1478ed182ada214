"""What the compute thread asks of a model, with weights or without. No MLX."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from mlxpool.worker.scheduling.sequence import Drawn, Sequence


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `active`, `cache` and `peak` are the allocator's; the others are parts of `active`."""

    weights: int = 0
    kv: int = 0  # rows of sequences at work
    prefix: int = 0  # what finished sequences left behind
    active: int = 0
    cache: int = 0  # freed by us, not yet by the allocator
    peak: int = 0  # of `active`, since the start
    limit: int = 0  # what the process may take; 0: not known
    device_free: int = 0  # of the machine or the GPU, whoever uses the rest; 0: not known


Share = tuple[Sequence, int]  # with the tokens of its next chunk at most


class Engine(Protocol):
    """A model at work. Called from one thread only."""

    @property
    def context(self) -> int:
        """Tokens, prompt and completion."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end a completion."""

    @property
    def chunk(self) -> int:
        """The largest prefill chunk in tokens."""

    @property
    def blocks(self) -> int:
        """How many blocks of keys and values (blocks.py) there is memory for, prefixes included."""

    def prefix_blocks(self) -> int:
        """Of these, taken by what finished sequences left behind."""

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        """Drops so much of that; returns the blocks it gave back.

        What rows at work began from goes only with `in_use`, when the rest is not enough.
        """

    @property
    def digest(self) -> str:
        """Of everything that decides which tokens and text a request gives."""

    @property
    def layout(self) -> str:
        """How it computes, in a few words for operators; "" where there is nothing to say."""

    @property
    def yields_cores(self) -> bool:
        """Whether steps may take fewer cores while others use them.

        Not where a GPU computes, nor where the last bit may not depend on how many there are.
        """

    def admit(self, seq: Sequence) -> None:
        """Takes a row and what the prefix cache has; sets `seq.cached` and `seq.prefilled`."""

    def joint(self, shares: Many[Share]) -> int:
        """How many of these chunks, from the first on, are computed in one pass: 1 or more."""

    def prefill_all(self, shares: Many[Share]) -> list[int]:
        """Computes a chunk for each of as many as `joint` says and adds it to its `prefilled`.

        The last token of `seq.tokens` is decode's, whoever computes it. Returns the tokens done, 0
        when a sequence is ready for decode. What fails fails for all, and their rows are gone.
        """

    def decode(self, rows: Many[Sequence]) -> list[Drawn]:
        """One new token for each row, in their order; the caller appends it to `seq.ids`."""

    def release(self, seq: Sequence) -> None:
        """The sequence ends here, whatever its phase; unknown ones are ignored."""

    def ahead(self) -> bool:
        """Whether the device is at work on a step that nobody has asked for yet."""

    def sound(self) -> bool:
        """Whether the device still computes, asked after something was raised.

        Some errors of a GPU fail every later call of the process.
        """

    def warm_up(self, moved: Callable[[], None]) -> None:
        """Computes every kind of step once, so that the first request does not pay for it.

        Calls `moved` after each: where kernels are compiled, the first time takes seconds.
        """

    def memory(self) -> Memory:
        """Where the bytes are now."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for."""

    def close(self) -> None:
        """Gives everything up."""
