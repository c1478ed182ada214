"""The tokenizer, chat templates and limits of a model, for the preparation of requests."""

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
    """A chat as text.

    `messages_end`: the number of characters before the generation prompt; 0: unknown. `thinks`: the
    text ends inside the model's thoughts. `cuts`: the positions at which the text is divided before
    it is tokenized, see media.literals.
    """

    text: str
    messages_end: int = 0
    thinks: bool = False
    cuts: Sequence[int] = ()


class TextModel(Protocol):
    """Tokenizer and chat templates of a model.

    Only `piece` is called by the compute thread. The other methods may take any time and memory, so
    they run in processes with limits, see worker/preparation.
    """

    max_bytes_per_token: int | None  # None: not known, see size_bound

    @property
    def images(self) -> ImageInput | None:
        """The model's settings for images; None: it takes only text."""

    @property
    def controls(self) -> tuple[Sequence[str], Sequence[str]]:
        """The texts of control tokens: special tokens, and other added tokens in chat templates."""

    def read_image(self, data: bytes, index: int) -> PreparedImage:
        """Decodes the file of image `index` of a request. Raises BadRequest with the index."""

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
        """Returns a chat as text; with `continues`, without a generation prompt."""

    def infill(self, text: str, suffix: str) -> list[int]:
        """Returns the ids of a prompt with a gap between `text` and `suffix`.

        Raises BadRequest if the tokenizer has no tokens for gaps.
        """

    def encode(self, text: str, cuts: Sequence[int] = (), *, begins: bool = True) -> list[int]:
        """Returns the ids of a text; no token crosses a position in `cuts`.

        `begins`: the ids begin with the tokens that begin a prompt. It is False for a rendered
        chat, which has begin tokens of its own.
        """

    def restore_at(self, text: str, messages_end: int, ids: Sequence[int]) -> int: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenTable(Struct, frozen=True):
    """The bytes of each token by id; the compute thread needs no other tokenizer data.

    `max_bytes_per_token`: the most bytes of text that one token covers; None: not known.
    """

    pieces: Sequence[bytes]
    max_bytes_per_token: int | None

    def piece(self, token: int) -> bytes:
        """Returns the bytes that a token adds inside of a text; b"" for an unknown id."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""


class TextSource(Struct, frozen=True):
    """The data with which another process prepares requests, see ChatTokenizer.from_source.

    `sha256`: digest of the file `tokenizer`. `templates`: sources of chat templates by name.
    `tokens`: special tokens by the name that templates use. `max_bytes_per_token`: the most bytes
    of text that one token covers; None: not known. `images`: the settings for images; None: the
    model takes only text. `added`: the tokens to add to the tokenizer, see AddedTokens. `closings`:
    the ids of the texts that end thoughts at a token limit, see ThoughtMarks; empty: the templates
    have no thoughts.
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
        """Returns a map of plain values for another process, see `from_map`."""
        return as_map(self)

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the source with the values of `as_map`."""
        images = fields.get("images")
        image_input = None if images is None else ImageInput.from_map(images)
        return cls(**{**fields, "images": image_input})


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose folder was checked; its weights are not loaded yet.

    `source`: the data with which other processes prepare requests; None: `text` is our own code and
    prepares requests. `eos`: the tokens that end an answer. `no_format`: why answers cannot be
    constrained to a format; "": formats are possible. `no_prompt_logprobs`: why log-probabilities
    of prompts are not available. `plain_contents`: control tokens in message contents are plain
    text, unless a request decides otherwise.
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
    texts: WholeTexts = field(init=False, repr=False, compare=False)  # shared by all completions

    def __post_init__(self) -> None:
        pieces = self.text.pieces if isinstance(self.text, TokenTable) else ()
        object.__setattr__(self, "texts", WholeTexts(self.text.piece, pieces))

    @property
    def images(self) -> ImageInput | None:
        """The model's settings for images; None: it takes only text."""
        return None if self.source is None else self.source.images
