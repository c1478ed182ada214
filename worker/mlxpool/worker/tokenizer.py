"""Text <-> tokens of one model, for the I/O thread; no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.common.messages import check_messages, check_tools
from mlxpool.worker.chat import Chat
from mlxpool.worker.folder import ModelFolder
from mlxpool.worker.mail import Prompt
from mlxpool.worker.pieces import Pieces

_SHOWN = 3  # tokens in an error that could list thousands


class Text:
    """A model's tokenizer and chat templates.

    `prefix` are the ids that begin every prompt, usually the begin-of-sequence token or nothing.
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat, prefix: Sequence[int] = ()) -> None:
        """Raises ModelLoadFailed for a decoder that is not supported."""
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._chat = chat
        self.prefix = tuple(prefix)

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> Text:
        """Raises ModelLoadFailed when the tokenizer or a template cannot be used with the model."""
        tokenizer = _read(folder.files / "tokenizer.json")
        prefix = _prefix(tokenizer, folder.bos_token, folder.add_bos)
        chat = Chat.from_folder(folder.files)
        check_vocabulary(tokenizer, folder.plan.vocab_size, prefix, chat)
        return cls(tokenizer, chat, prefix)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with `prefix` in front unless the text already has it.

        Special tokens written out in the text count as such. Raises BadRequest for text that is
        not Unicode.
        """
        encoding = self._encoding(text)
        return [*self._missing(encoding), *encoding.ids]

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text that has begun, b"" for an unknown one."""
        return self._pieces[token]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids alone; bytes that are not UTF-8 become U+FFFD."""
        return self._pieces.whole(ids)

    def chat(self, messages: object, tools: object, now: float) -> Prompt:
        """The prompt of a chat. Raises BadRequest, see `check_messages` and `Chat.render`."""
        checked, offered = check_messages(messages), check_tools(tools)
        text = self._chat.render(checked, offered, now=now)
        encoding = self._encoding(text)
        missing = self._missing(encoding)
        end = self._end_of_messages(text, checked, offered, now)
        at = encoding.char_to_token(end) if end else None
        return Prompt([*missing, *encoding.ids], len(missing) + at if at else 0)

    def _end_of_messages(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        now: float,
    ) -> int:
        """The character at which the generation prompt begins, 0 when it cannot be told."""
        if not self._chat.prompts_generation(bool(tools)):
            return 0
        try:
            bare = self._chat.render(messages, tools, now=now, add_generation_prompt=False)
        except BadRequest:
            return 0  # it is only a hint
        return len(bare) if text.startswith(bare) and len(bare) < len(text) else 0

    def _encoding(self, text: str) -> Encoding:
        try:
            # encode_batch releases the GIL, encode does not
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise BadRequest(f"the prompt is not valid Unicode text: {error}") from error
        return encoding

    def _missing(self, encoding: Encoding) -> tuple[int, ...]:
        """What has to go in front so that `prefix` is there once."""
        size = len(self.prefix)
        return () if tuple(encoding.ids[:size]) == self.prefix else self.prefix


def _read(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, rows: int, prefix: Sequence[int], chat: Chat) -> None:
    """Whether the ids that texts give have rows in the model's embedding.

    An added token without a row is let pass if neither the prefix nor a template writes it: some
    models keep those of a larger sibling. A prompt that has it is refused. Raises ModelLoadFailed.
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
            f"prompts have {', '.join(named[:_SHOWN])}, the model has rows for {rows} ids"
            " (vocab_size of config.json): the tokenizer is of another model"
        )


def _prefix(tokenizer: Tokenizer, bos_token: str | None, add_bos: bool | None) -> list[int]:
    """What the tokenizer's own post-processor puts in front, else the begin token if it is asked.

    `add_bos` False takes the begin token out of it.
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
