"""Text <-> tokens of one model, for the I/O thread; no MLX."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.chat import Template
from mlxpool.worker.folder import ModelFolder, read_json
from mlxpool.worker.renderer import NICENESS, Renderer
from mlxpool.worker.text import TokenBytes


class Text:
    """A model's tokenizer and chat template.

    `prefix` are the ids that begin every prompt, usually the begin-of-sequence token or nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, table: TokenBytes, template: Template, prefix: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._renderer = Renderer(template)
        self._encoder = ThreadPoolExecutor(1, "tokenise", give_way)
        self.prefix = tuple(prefix)

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> Text:
        """Raises ModelLoadFailed when tokenizer.json cannot be read."""
        file = folder.path / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(file))
            table = TokenBytes.from_tokenizer(read_json(file))
        except ModelLoadFailed:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        prefix = _prefix(tokenizer, folder.bos_token, folder.add_bos)
        return cls(tokenizer, table, Template.from_folder(folder.path), prefix)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with `prefix` in front unless the text already has it.

        Special tokens written out in the text count as such. Raises BadRequest for text that is
        not Unicode.
        """
        try:
            ids = self._encoder.submit(self._encoded, text).result()
        except (TypeError, UnicodeError) as error:
            raise BadRequest(f"the prompt is not valid Unicode text: {error}") from error
        if tuple(ids[: len(self.prefix)]) == self.prefix:
            return ids
        return [*self.prefix, *ids]

    def _encoded(self, text: str) -> list[int]:
        # encode_batch releases the GIL, encode does not
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for, b"" for an unknown one."""
        return self._table[token]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def render(self, messages: object, now: float) -> str:
        """The prompt text of a chat, see `Renderer.render`."""
        return self._renderer.render(messages, now)


def give_way() -> None:
    """Running steps come before this thread, where threads have a priority each.

    Only for threads that seldom hold the interpreter: the others would wait with them.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, before + NICENESS))


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
