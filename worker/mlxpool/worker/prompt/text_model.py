"""What the preparation of requests needs to know of a model: its text functions, its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from msgspec import Struct

from mlxpool.common.records import as_map
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.settings import ImageInput
from mlxpool.worker.prompt.detokenizer import WholeTexts


class RenderedChat(Struct, frozen=True):
    """A chat as text; `messages_end` characters of it precede the generation prompt, 0: unknown.

    `thinks`: the text ends inside the model's thoughts. `cuts`: places in the text at which it is
    divided before it is tokenized, see media.literals.
    """

    text: str
    messages_end: int = 0
    thinks: bool = False
    cuts: Sequence[int] = ()


class TextModel(Protocol):
    """Tokenizer and chat templates of a model.

    Only `piece` is called by the compute thread. The other methods run in processes with bounds,
    see worker/preparation: they may take any time and memory.
    """

    max_bytes_per_token: int | None  # of text; None: not known, see size_bound

    @property
    def images(self) -> ImageInput | None:
        """How the model reads images; None: it takes text only."""

    @property
    def controls(self) -> tuple[Sequence[str], Sequence[str]]:
        """Texts that are control tokens: special tokens, and others that chat templates write."""

    def read_image(self, data: bytes, index: int) -> PreparedImage:
        """Decodes the file of image `index` of a request. Raises BadRequest naming it."""

    def piece(self, token: int) -> bytes: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        now: float,
        think: bool | str | None,
        *,
        continues: bool = False,
    ) -> RenderedChat:
        """Renders a chat; `continues`: without the begin of an answer behind it."""

    def infill(self, text: str, suffix: str) -> list[int]:
        """Tokenizes a text with a gap behind it, which `suffix` follows. Raises BadRequest."""

    def encode(self, text: str, cuts: Sequence[int] = (), *, begins: bool = True) -> list[int]:
        """Tokenizes a text; no token spans a place of `cuts`.

        `begins`: the ids begin as a prompt does; False for a rendered chat, which has its own.
        """

    def restore_at(self, text: str, messages_end: int, ids: Sequence[int]) -> int: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenTable(Struct, frozen=True):
    """The bytes of each token, by its id: all that the compute thread needs of a tokenizer.

    `max_bytes_per_token`: see size_bound.
    """

    pieces: Sequence[bytes]
    max_bytes_per_token: int | None

    def piece(self, token: int) -> bytes:
        """The bytes that a token appends to a text that has begun; b"" for an unknown id."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""


class TextSource(Struct, frozen=True):
    """What another process needs to prepare requests of a model, see ChatTokenizer.from_source.

    `sha256`: of the file `tokenizer`. `templates`: sources of chat templates by name; `tokens`:
    special tokens by the name that templates use. `max_bytes_per_token`: see size_bound. `images`:
    how the model reads images; None: it takes text only. `added`: see AddedTokens. `closings`: the
    ids of those of ThoughtMarks, of the format in which the templates have thoughts; none: they
    have none.
    """

    tokenizer: str
    sha256: str
    prefix: Sequence[int]
    templates: Mapping[str, str]
    tokens: Mapping[str, str]
    max_bytes_per_token: int | None
    images: ImageInput | None = None
    added: Sequence[Mapping[str, str | bool]] = ()
    closings: Sequence[Sequence[int]] = ()

    def as_map(self) -> dict[str, Any]:
        """Plain values for another process, of which `from_map` makes it again."""
        return as_map(self)

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the source of which `as_map` gave the values."""
        images = fields.get("images")
        found = None if images is None else ImageInput.from_map(images)
        return cls(**{**fields, "images": found})


@dataclass(frozen=True, slots=True)
class Opened:
    """The model's folder was checked; its weights are not loaded yet.

    `source`: what other processes need to prepare requests; None: `text` is our own code, and does.
    `eos`: the tokens that end an answer. `no_format`: why answers cannot be constrained to a
    format; "": they can. `no_prompt_logprobs`: why log-probabilities of prompts cannot be had.
    `plain_contents`: control tokens that contents have as text are text, unless a request says.
    """

    digest: str
    context: int
    vocab_size: int
    text: TextModel | TokenTable
    source: TextSource | None = None
    eos: frozenset[int] = frozenset()
    no_format: str = ""
    no_prompt_logprobs: str = ""
    plain_contents: bool = False
    texts: WholeTexts = field(init=False, repr=False, compare=False)  # for all completions

    def __post_init__(self) -> None:
        pieces = self.text.pieces if isinstance(self.text, TokenTable) else ()
        object.__setattr__(self, "texts", WholeTexts(self.text.piece, pieces))

    @property
    def images(self) -> ImageInput | None:
        """How the model reads images; None: it takes text only."""
        return None if self.source is None else self.source.images
