"""What an encoder model is given."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class EncoderInput(Struct, frozen=True):
    """One text, or pair of texts, as the model reads it: token ids with the special ones.

    `types`: the segment of each token, 0 or 1; empty: all are 0.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


class EncodeInputs(Struct, frozen=True):
    """Make inputs of an encoder model of texts, or of pairs; the fields are those of EncoderCall.

    Pairs travel as lists.
    """

    texts: Sequence[str] = ()
    pairs: Sequence[Sequence[str]] = ()
    prompt_name: str = ""
    prompt: str | None = None
    truncate: bool = False
    first: int = 0

    @property
    def size(self) -> int:
        """Characters."""
        return sum(map(len, self.texts)) + sum(len(one) for pair in self.pairs for one in pair)
