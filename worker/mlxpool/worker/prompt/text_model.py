"""What request preparation needs to know of a model: its text functions, its limits. No MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of one prompt.

    `restore_at` counts the ids before the generation prompt, where a later conversation may branch
    off; 0: unknown. `thinks`: the prompt ends inside the model's thoughts.
    """

    ids: list[int]
    restore_at: int = 0
    thinks: bool = False


Fits = Callable[[int], None]  # is given the number of ids of a prompt; raises if there are too many


def any_size(size: int) -> None:
    """Accepts every prompt."""


class TextModel(Protocol):
    """Tokenizer and chat templates of a model.

    The thread that prepares requests calls it; the compute thread calls only `piece`.
    To make a long list of ids holds the interpreter lock for milliseconds, so `fits` is called with
    its length before it is made.
    """

    def warm_up(self) -> None:
        """Runs tokenizer and templates once, in the thread that prepares prompts."""

    def encode(self, text: str, fits: Fits = any_size) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> bytes: ...

    def chat(
        self, messages: Any, tools: Any, now: float, fits: Fits = any_size, think: Any = None
    ) -> EncodedPrompt: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """The model's folder was checked; its weights are not loaded yet."""

    digest: str
    context: int
    vocab_size: int
    text: TextModel
