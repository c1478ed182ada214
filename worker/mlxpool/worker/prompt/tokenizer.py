"""Text <-> tokens of one model, for the I/O thread; no MLX."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from mlxpool.common.errors import BadRequest, Internal, ModelLoadFailed
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.worker.compute.messages import Fits, Prompt, any_size
from mlxpool.worker.process.cpu_threads import of_process
from mlxpool.worker.prompt.chat_template.output_format import opens_thinking
from mlxpool.worker.prompt.chat_template.process import NICENESS
from mlxpool.worker.prompt.chat_template.renderer import Rendered, Renderer
from mlxpool.worker.prompt.chat_template.templates import Chat
from mlxpool.worker.prompt.idle_thread import of_what_is_left
from mlxpool.worker.prompt.token_bytes import Pieces
from mlxpool.worker.weights.inspect import ModelFolder

LONG = 16 * 1024  # characters that take more than some milliseconds
PATIENCE = 1.0  # seconds that a long text may take of what running steps leave
_BEGIN = 256  # characters of a text whose ids tell whether it begins with `prefix`
_SHOWN = 3  # tokens in an error that could list thousands


class Text:
    """A model's tokenizer and chat templates.

    `prefix` are the ids that begin every prompt, usually the begin-of-sequence token or nothing.
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat, prefix: Sequence[int] = ()) -> None:
        """Raises ModelLoadFailed for a decoder that is not supported."""
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._renderer = Renderer(chat)
        self.prefix = tuple(prefix)

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> Text:
        """Raises ModelLoadFailed when the tokenizer or a template cannot be used with the model."""
        tokenizer = read_tokenizer(folder.files / "tokenizer.json")
        prefix = _prefix(tokenizer, folder.bos_token, folder.add_bos)
        chat = Chat.from_folder(folder.files)
        check_vocabulary(tokenizer, folder.plan.vocab_size, prefix, chat)
        return cls(tokenizer, chat, prefix)

    def warm_up(self) -> None:
        """Have what prompts need at work: the process of the templates, the tokenizer's threads.

        Called by the thread that will ask for chats, see Renderer.
        """
        with contextlib.suppress(Internal):  # the first chat tries again and says it
            self._renderer.start()
        gentle = threading.Thread(target=_start_threads, args=[self._tokenizer])
        gentle.start()
        gentle.join()

    def encode(self, text: str, fits: Fits = any_size) -> list[int]:
        """The ids of a prompt, with `prefix` in front unless the text already has it.

        Special tokens written out in the text count as such. Raises BadRequest for text that is
        not Unicode, and what `fits` raises.
        """
        missing, encoding = self._missing(text), self._encoding(text)
        fits(len(missing) + len(encoding))
        return [*missing, *encoding.ids]

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text that has begun, b"" for an unknown one."""
        return self._pieces[token]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids alone; bytes that are not UTF-8 become U+FFFD."""
        return self._pieces.whole(ids)

    def chat(
        self,
        messages: object,
        tools: object,
        now: float,
        fits: Fits = any_size,
        think: object = None,
    ) -> Prompt:
        """The prompt of a chat.

        Raises BadRequest, see `check_messages` and `Renderer.render`, and what `fits` raises.
        """
        chat = self._renderer.render(
            check_messages(messages), check_tools(tools), now, check_think(think)
        )
        ids = self.encode(chat.text, fits)
        restore_at = self._restore_at(chat, ids) if chat.end else 0
        return Prompt(ids, restore_at, opens_thinking(chat.text))

    def _restore_at(self, chat: Rendered, ids: list[int]) -> int:
        """How many ids lie before the generation prompt; one that begins before it does not.

        It mostly begins with a special token, and then its ids are the last ones. Only where they
        are not the characters of every token are needed, which costs as much again.
        """
        last = self._encoding(chat.text[chat.end :]).ids
        if ids[-len(last) :] == last:
            return len(ids) - len(last)
        (encoding,) = self._tokenizer.encode_batch([chat.text], add_special_tokens=False)
        at = encoding.char_to_token(chat.end)
        return len(ids) - len(encoding) + at if at else 0

    def _encoding(self, text: str) -> Encoding:
        """Without the characters of tokens: to free these holds the interpreter for long.

        A batch of one is the work of the thread that asks. In a batch of two, the library's own
        threads do it; see `_start_threads`.
        """
        if len(text) >= LONG:
            with of_process().spared():
                batch = of_what_is_left(partial(self._batch, [text]), PATIENCE)
                return self._quick(text) if batch is None else batch[0]
        return self._quick(text)

    def _quick(self, text: str) -> Encoding:
        try:
            encoding, _ = self._batch([text, ""])
        except (TypeError, UnicodeError) as error:
            raise BadRequest(f"the prompt is not valid Unicode text: {error}") from error
        return encoding

    def _batch(self, texts: list[str]) -> list[Encoding]:
        return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _missing(self, text: str) -> tuple[int, ...]:
        """What has to go in front so that `prefix` is there once."""
        size = len(self.prefix)
        begin = self._encoding(text[:_BEGIN]).ids[:size] if size else []
        return () if tuple(begin) == self.prefix else self.prefix


def _start_threads(tokenizer: Tokenizer) -> None:
    """The first batch starts the library's threads; on Linux they are as nice as who asks for it.

    So a long prompt leaves the processor to the model's steps. They never hold the interpreter.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    tokenizer.encode_batch_fast(["a", "b"])


def read_tokenizer(file: Path) -> Tokenizer:
    """Raises ModelLoadFailed naming the file that cannot be read."""
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
