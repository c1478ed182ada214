"""Keeps the tokenizer data of a model on disk, for later loads of the same files. No MLX.

Other processes read the tokenizer itself (preparation/fork_server.py). So a worker that finds the
kept data need not read it.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.prompt.added_tokens import OLDER_IDS
from mlxpool.worker.prompt.text_model import TextSource, TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.system.kept_files import KeptFile, code
from mlxpool.worker.versions import version_of
from mlxpool.worker.weights.chat_template_files import all_regular
from mlxpool.worker.weights.inspect import ModelFolder, digest_now
from mlxpool.worker.weights.json_files import is_present, read_file

KIND = "tokenizer"


class KeptText(Struct, frozen=True):
    """The tokenizer data that a load keeps for later loads.

    `source`: the map of a TextSource. `pieces`: the bytes of each token. `notes`: contradictions
    between the tokenizer's files.
    """

    source: dict[str, Any]
    pieces: tuple[bytes, ...]
    notes: tuple[str, ...]


def text_of(folder: ModelFolder) -> tuple[TokenTable, TextSource, tuple[str, ...]]:
    """Returns a model's tokenizer data; reads the tokenizer only if no data is kept.

    The data is a table of token bytes, the source for processes that prepare requests, and notes to
    log. Raises ModelLoadFailed if the tokenizer or a chat template cannot be used.
    """
    key = key_of(folder)
    file = KeptFile(KIND, key)
    # The digest excludes templates that are not regular files; `_read` refuses such a template.
    kept = _decoded(file) if all_regular(folder.files) else None
    if kept is None:
        kept = _read(folder)
        # If the files have changed since they were checked, no file is written.
        if file.path is not None and key == key_of(replace(folder, digest=digest_now(folder))):
            with suppress(UnicodeEncodeError):  # for a lone surrogate in a template
                file.write(msgspec.msgpack.encode(kept))
    path = str(folder.files / "tokenizer.json")
    source = TextSource.from_map({**kept.source, "tokenizer": path})
    return TokenTable(kept.pieces, source.max_bytes_per_token), source, kept.notes


def key_of(folder: ModelFolder) -> dict[str, Any]:
    """Returns the key of a model's kept tokenizer data: all values that decide its content."""
    older = folder.files / OLDER_IDS
    ids = hashlib.sha256(read_file(older)).hexdigest() if is_present(older) else ""
    return {
        **code(),
        "tokenizers": version_of("tokenizers"),
        "jinja2": version_of("jinja2"),  # only a load without kept data compiles templates
        "model": folder.digest,
        "ids": ids,
        "rows": folder.plan.embedding_rows,
        "tokens": folder.plan.vocab_size,
    }


def _decoded(file: KeptFile) -> KeptText | None:
    content = file.read()
    if content is None:
        return None
    try:
        return msgspec.msgpack.decode(content, type=KeptText)
    except msgspec.DecodeError as error:
        file.refuse(str(error))
        return None


def _read(folder: ModelFolder) -> KeptText:
    text = ChatTokenizer.from_folder(folder)
    pieces = tuple(map(text.piece, range(folder.plan.vocab_size)))
    return KeptText(text.source.as_map(), pieces, tuple(text.notes))
