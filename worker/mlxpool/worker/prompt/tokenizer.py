"""The tokenizer of one model with its chat templates. Imports no MLX."""

from __future__ import annotations

import contextlib
import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.literals import parts_of
from mlxpool.worker.media.settings import ImageInput
from mlxpool.worker.prompt import thoughts
from mlxpool.worker.prompt.added_tokens import AddedTokens, TokenFields
from mlxpool.worker.prompt.added_tokens import add as add_tokens
from mlxpool.worker.prompt.chat_template.output_format import chat_format, opens_thinking
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates, compiled
from mlxpool.worker.prompt.infill import infill_ids
from mlxpool.worker.prompt.size_bound import max_bytes_per_token
from mlxpool.worker.prompt.text_model import RenderedChat, TextSource, TokenTable
from mlxpool.worker.prompt.token_bytes import TokenBytes
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.json_files import read_file

_PREFIX_PROBE = 256  # characters that are encoded to check whether a text begins with `prefix`
_MAX_NAMED = 3  # the most tokens named in an error


class ChatTokenizer:
    """A model's tokenizer and chat templates.

    `source.prefix` holds the ids before the text of a prompt: usually the begin-of-sequence token,
    or nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatTemplates,
        source: TextSource,
        notes: Sequence[str] = (),
    ) -> None:
        """`notes`: contradictions between files. Raises ModelLoadFailed for an unknown decoder."""
        self.source = source
        self.notes = notes
        self.prefix = tuple(source.prefix)
        self.max_bytes_per_token = source.max_bytes_per_token
        self.images = source.images
        self._chat = chat
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        texts = [token.content for token in added if not token.special]
        templates = source.templates.values()
        named = [text for text in texts if any(text in template for template in templates)]
        self.controls = [token.content for token in added if token.special], named

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> ChatTokenizer:
        """Opens a model's tokenizer. Raises ModelLoadFailed if it or a template cannot be used."""
        file = folder.files / "tokenizer.json"
        tokenizer, data = read_tokenizer(file)
        added = AddedTokens(folder.files, tokenizer, folder.plan.embedding_rows)
        add_tokens(tokenizer, added.fields)
        prefix = _prefix(tokenizer, folder.bos_token, folder.add_bos)
        chat = ChatTemplates.from_folder(folder.files)
        check_vocabulary(tokenizer, folder.plan.embedding_rows, prefix, chat)
        templates = {name: template.source for name, template in chat.templates.items()}
        source = TextSource(
            str(file),
            hashlib.sha256(data).hexdigest(),
            prefix,
            templates,
            chat.tokens,
            _max_bytes(data, added.fields),
            image_input(folder, tokenizer),
            added.fields,
            closings_of(tokenizer, templates),
        )
        return cls(tokenizer, chat, source, (*added.notes, *chat.notes))

    @classmethod
    def from_source(cls, source: TextSource) -> ChatTokenizer:
        """Opens a tokenizer in another process. Raises ModelLoadFailed if a file has changed."""
        tokenizer, data = read_tokenizer(Path(source.tokenizer))
        add_tokens(tokenizer, source.added)
        if hashlib.sha256(data).hexdigest() != source.sha256:
            raise ModelLoadFailed(f"{source.tokenizer} has changed since the model was loaded")
        return cls(tokenizer, ChatTemplates(compiled(source.templates), source.tokens), source)

    def encode(self, text: str, cuts: Sequence[int] = (), *, begins: bool = True) -> list[int]:
        """Returns the ids of a prompt, beginning with `prefix`; a missing prefix is added.

        Without `begins`, returns only the ids of the text. Special tokens written out in the text
        become special ids, unless one of `cuts` divides them. Raises BadRequest if the text is not
        Unicode.
        """
        ids = [*self._missing(text)] if begins else []
        for part in parts_of(text, cuts):
            ids += self._ids(part)
        return ids

    def infill(self, text: str, suffix: str) -> list[int]:
        """Returns the ids of a prompt with a gap between `text` and `suffix`.

        The ids begin with `prefix`.
        """
        return [*self.prefix, *infill_ids(text, suffix, self._tokenizer.token_to_id, self._ids)]

    def piece(self, token: int) -> bytes:
        """Returns the bytes that a token adds inside of a text; b"" for an unknown id."""
        return self._token_bytes[token]

    def table(self, vocab_size: int) -> TokenTable:
        """Returns a TokenTable of the ids below `vocab_size`; the table needs no tokenizer."""
        pieces = tuple(map(self.piece, range(vocab_size)))
        return TokenTable(pieces, self.max_bytes_per_token)

    def read_image(self, data: bytes, index: int) -> PreparedImage:
        """Decodes and resizes the file of image `index` of a request; see TextModel.

        Call it in a process with limits: it may take any time and memory.
        """
        from mlxpool.worker.media.decode import prepared_image  # the worker itself needs no Pillow

        assert self.images is not None
        return prepared_image(data, index, self.images.settings)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids; bytes that are not UTF-8 become U+FFFD."""
        return self._token_bytes.whole(ids)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        now: float,
        think: bool | str | None,
        *,
        continues: bool = False,
    ) -> RenderedChat:
        """Returns a chat as text; with `continues`, without a generation prompt.

        Call it in a process with limits: a template may take any time and memory. Raises
        BadRequest, see ChatTemplates.render.
        """
        if continues:
            text = self._chat.render(
                messages, tools, now=now, think=think, add_generation_prompt=False
            )
            return RenderedChat(text)
        text = self._chat.render(messages, tools, now=now, think=think)
        bare = ""
        if self._chat.prompts_generation(bool(tools)):
            with contextlib.suppress(BadRequest):  # the position `ends` is only a hint
                bare = self._chat.render(
                    messages, tools, now=now, think=think, add_generation_prompt=False
                )
        ends = len(bare) if text.startswith(bare) and len(bare) < len(text) else 0
        return RenderedChat(text, ends, opens_thinking(text))

    def restore_at(self, text: str, messages_end: int, ids: Sequence[int]) -> int:
        """Returns the number of ids before the generation prompt.

        The generation prompt begins at the character `messages_end`; an id across this position is
        not counted. Mostly the generation prompt begins with a special token; then its ids are the
        last ids of the prompt. Otherwise the character offsets of all tokens are computed, which
        takes as long as encoding the text.
        """
        last = self._ids(text[messages_end:])
        if list(ids[-len(last) :]) == last:
            return len(ids) - len(last)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        at = encoding.char_to_token(messages_end)
        return len(ids) - len(encoding) + at if at else 0

    def _ids(self, text: str) -> list[int]:
        """Returns the ids of a text without `prefix`, and without offsets, which is faster."""
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise BadRequest(f"the prompt is not valid Unicode text: {error}") from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise BadRequest(f"the tokenizer of this model fails with this text: {error}") from None
        ids: list[int] = encoding.ids
        return ids

    def _missing(self, text: str) -> tuple[int, ...]:
        """Returns the ids to prepend so that the text begins with `prefix` once."""
        size = len(self.prefix)
        begin = self._ids(text[:_PREFIX_PROBE])[:size] if size else []
        return () if tuple(begin) == self.prefix else self.prefix


def closings_of(tokenizer: Tokenizer, templates: Mapping[str, str]) -> list[list[int]]:
    """Returns the ids that end thoughts at a bound; empty if the templates show no thoughts."""
    sources = templates.values()
    texts = thoughts.closings_of((chat_format(sources) or {}).get("thinking"), sources)
    return [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def image_input(folder: ModelFolder, tokenizer: Tokenizer) -> ImageInput | None:
    """Returns the model's settings for images; None: the model takes only text.

    Raises ModelLoadFailed if the tokenizer lacks the token for images.
    """
    vision = folder.vision
    if vision is None:
        return None
    texts: dict[int, str] = {}
    for token in vision.plan.tokens:
        text = tokenizer.id_to_token(token)
        if text is None:
            raise ModelLoadFailed(
                f"tokenizer.json has no token with the id {token}, which stands for images in"
                " config.json: the tokenizer is of another model"
            )
        texts[token] = text
    return ImageInput(vision.settings, vision.plan.places(texts))


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is a panic of native code, which is not an Exception.

    For example, a tokenizer's pattern that needs too many tries panics.
    """
    return type(error).__name__ == "PanicException"


def read_tokenizer(file: Path) -> tuple[Tokenizer, bytes]:
    """Returns the tokenizer of a tokenizer.json, and the file's bytes. Raises ModelLoadFailed."""
    data = read_file(file)
    try:
        tokenizer = Tokenizer.from_buffer(data.removeprefix(BOM_UTF8))
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, data


def check_vocabulary(
    tokenizer: Tokenizer, rows: int, prefix: Sequence[int], chat: ChatTemplates
) -> None:
    """Checks that the ids of texts have embeddings. Raises ModelLoadFailed.

    An added token without an embedding is accepted if neither the prefix nor a template writes it:
    some models have the added tokens of a larger sibling. A prompt with this token is refused.
    """
    beyond = [id for id in tokenizer.get_vocab(with_added_tokens=False).values() if id >= rows]
    if beyond:
        raise ModelLoadFailed(
            f"tokenizer.json has ids up to {max(beyond)}, the model has rows for {rows} (vocab_size"
            " of config.json): the tokenizer is of another model"
        )
    sources = [template.source for template in chat.templates.values()]
    named = [
        f"{added.content!r} (id {id})"
        for id, added in sorted(tokenizer.get_added_tokens_decoder().items())
        if id >= rows and (id in prefix or any(added.content in source for source in sources))
    ]
    if named:
        raise ModelLoadFailed(
            f"prompts have {', '.join(named[:_MAX_NAMED])}, the model has rows for {rows} ids"
            " (vocab_size of config.json): the tokenizer is of another model"
        )


def _max_bytes(data: bytes, added: Sequence[TokenFields]) -> int | None:
    """Returns the most bytes of text that one token covers; None if no bound is known.

    `data`: the content of tokenizer.json. `added`: further added tokens.
    """
    whole = json.loads(data)
    whole["added_tokens"] = [*(whole.get("added_tokens") or ()), *added]
    return max_bytes_per_token(whole)


def _prefix(tokenizer: Tokenizer, bos_token: str | None, add_bos: bool | None) -> list[int]:
    """Returns the ids that the tokenizer's own post-processor prepends.

    `add_bos` True adds a missing begin token; False removes the begin token.
    """
    bos = None if bos_token is None else tokenizer.token_to_id(bos_token)
    prefix = _processed_prefix(tokenizer)
    if add_bos is False:
        return [token for token in prefix if token != bos]
    if add_bos and bos is not None and bos not in prefix:
        return [bos, *prefix]
    return prefix


def _processed_prefix(tokenizer: Tokenizer) -> list[int]:
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    processed = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(processed) - len(plain) + 1):
        if processed[start : start + len(plain)] == plain:
            return list(processed[:start])
    return []
