"""What an encoder model is given and for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Task: TypeAlias = Literal["embed", "rerank", "classify"]
TASKS: tuple[Task, ...] = ("embed", "rerank", "classify")


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One text, or pair of texts, as the model reads it: token ids with the special ones.

    `types`: the segment of each token, 0 or 1; empty: all are 0.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()
