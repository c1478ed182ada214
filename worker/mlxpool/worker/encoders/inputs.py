"""The inputs of an encoder model."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class EncoderInput(Struct, frozen=True):
    """The token ids of one text or pair of texts, special tokens included.

    `types`: the segment of each token, 0 or 1; empty: all segments are 0.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


class EncodeInputs(Struct, frozen=True):
    """A job: make encoder inputs from `texts` or from `pairs` of texts.

    `prompt`, or else the model's prompt `prompt_name`, is put before a text. `truncate`: a too long
    input is truncated instead of refused. `first`: the number of the first input in errors. In
    messages, pairs are lists.
    """

    texts: Sequence[str] = ()
    pairs: Sequence[Sequence[str]] = ()
    prompt_name: str = ""
    prompt: str | None = None
    truncate: bool = False
    first: int = 0

    @property
    def size(self) -> int:
        """The number of characters of all texts."""
        return sum(map(len, self.texts)) + sum(len(text) for pair in self.pairs for text in pair)
