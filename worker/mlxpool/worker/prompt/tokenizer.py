"""The tokenizer of one model with its chat templates. Imports no MLX."""

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
from mlxpool.worker.prompt.chat_template.output_format import opens_thinking
from mlxpool.worker.prompt.chat_template.renderer import RenderedChat, Renderer
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.prompt.text_model import EncodedPrompt, Fits, any_size
from mlxpool.worker.prompt.token_bytes import TokenBytes
from mlxpool.worker.system.cpu_threads import process_cpu_threads
from mlxpool.worker.system.idle_thread import LONG_WORK_NICENESS, run_idle
from mlxpool.worker.weights.inspect import ModelFolder

LONG_TEXT = 16 * 1024  # characters; encoding so many takes more than a few milliseconds
IDLE_TIMEOUT = 1.0  # seconds that a SCHED_IDLE thread may take for a long text
_PREFIX_PROBE = 256  # characters whose ids tell whether a text begins with `prefix`
_MAX_NAMED = 3  # tokens named in an error that could list thousands


class ChatTokenizer:
    """A model's tokenizer and chat templates.

    `prefix` holds the ids that begin every prompt: usually the begin-of-sequence token, or nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatTemplates, prefix: Sequence[int] = ()
    ) -> None:
        """Raises ModelLoadFailed for a decoder that is not supported."""
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._renderer = Renderer(chat)
        self.prefix = tuple(prefix)

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> ChatTokenizer:
        """Raises ModelLoadFailed when the tokenizer or a template cannot be used with the model."""
        tokenizer = read_tokenizer(folder.files / "tokenizer.json")
        prefix = _prefix(tokenizer, folder.bos_token, folder.add_bos)
        chat = ChatTemplates.from_folder(folder.files)
        check_vocabulary(tokenizer, folder.plan.vocab_size, prefix, chat)
        return cls(tokenizer, chat, prefix)

    def warm_up(self) -> None:
        """Start the renderer process and the tokenizer's threads.

        Called by the thread that will render chats, see Renderer.
        """
        with contextlib.suppress(Internal):  # the first chat tries again and raises it
            self._renderer.start()
        starter = threading.Thread(target=_start_threads, args=[self._tokenizer])
        starter.start()
        starter.join()

    def encode(self, text: str, fits: Fits = any_size) -> list[int]:
        """The ids of a prompt, which begin with `prefix`: it is added unless the text has it.

        Special tokens written out in the text become special ids. Raises BadRequest for text that
        is not Unicode, and what `fits` raises.
        """
        missing, encoding = self._missing(text), self._encoding(text)
        fits(len(missing) + len(encoding))
        return [*missing, *encoding.ids]

    def piece(self, token: int) -> bytes:
        """The bytes that a token appends to a text that has begun; b"" for an unknown id."""
        return self._token_bytes[token]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; bytes that are not UTF-8 become U+FFFD."""
        return self._token_bytes.whole(ids)

    def chat(
        self,
        messages: object,
        tools: object,
        now: float,
        fits: Fits = any_size,
        think: object = None,
    ) -> EncodedPrompt:
        """The prompt of a chat.

        Raises BadRequest, see `check_messages` and `Renderer.render`, and what `fits` raises.
        """
        chat = self._renderer.render(
            check_messages(messages), check_tools(tools), now, check_think(think)
        )
        ids = self.encode(chat.text, fits)
        restore_at = self._restore_at(chat, ids) if chat.messages_end else 0
        return EncodedPrompt(ids, restore_at, opens_thinking(chat.text))

    def _restore_at(self, chat: RenderedChat, ids: list[int]) -> int:
        """How many ids precede the generation prompt; an id that spans its begin is not counted.

        The generation prompt mostly begins with a special token, and then its ids are the last ones
        of the prompt. Only otherwise the character offsets of every token are computed, which takes
        as long as encoding the text.
        """
        last = self._encoding(chat.text[chat.messages_end :]).ids
        if ids[-len(last) :] == last:
            return len(ids) - len(last)
        (encoding,) = self._tokenizer.encode_batch([chat.text], add_special_tokens=False)
        at = encoding.char_to_token(chat.messages_end)
        return len(ids) - len(encoding) + at if at else 0

    def _encoding(self, text: str) -> Encoding:
        """The encoding without character offsets: freeing these holds the interpreter for long.

        The library encodes a batch of one in the calling thread, and a batch of two in threads of
        its own, see `_start_threads`.
        """
        if len(text) >= LONG_TEXT:
            with process_cpu_threads().spare_core():
                batch = run_idle(partial(self._batch, [text]), IDLE_TIMEOUT)
                return self._encode_in_library_threads(text) if batch is None else batch[0]
        return self._encode_in_library_threads(text)

    def _encode_in_library_threads(self, text: str) -> Encoding:
        try:
            encoding, _ = self._batch([text, ""])
        except (TypeError, UnicodeError) as error:
            raise BadRequest(f"the prompt is not valid Unicode text: {error}") from error
        return encoding

    def _batch(self, texts: list[str]) -> list[Encoding]:
        return list(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _missing(self, text: str) -> tuple[int, ...]:
        """The ids to prepend so that the text begins with `prefix` once."""
        size = len(self.prefix)
        begin = self._encoding(text[:_PREFIX_PROBE]).ids[:size] if size else []
        return () if tuple(begin) == self.prefix else self.prefix


def _start_threads(tokenizer: Tokenizer) -> None:
    """Encode a first batch, which starts the library's threads.

    On Linux they inherit the nice value of the calling thread, so that a long prompt gives way to
    the model's steps. They never hold the interpreter lock.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(
            os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LONG_WORK_NICENESS
        )
    tokenizer.encode_batch_fast(["a", "b"])


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises ModelLoadFailed naming an unreadable file."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_vocabulary(
    tokenizer: Tokenizer, rows: int, prefix: Sequence[int], chat: ChatTemplates
) -> None:
    """Check that the ids of texts have rows in the model's embedding. Raises ModelLoadFailed.

    An added token without a row is accepted if neither the prefix nor a template writes it: some
    models keep those of a larger sibling. A prompt with such a token is refused.
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


def _prefix(tokenizer: Tokenizer, bos_token: str | None, add_bos: bool | None) -> list[int]:
    """The ids that the tokenizer's own post-processor prepends.

    `add_bos` True adds the begin token if it is missing; False removes it.
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
