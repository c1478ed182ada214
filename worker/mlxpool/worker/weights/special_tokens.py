"""The tokens that begin and end a text, from all files that may name them. No MLX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.json_files import FileLookup, optional_json

_ID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that begin and end a text."""

    eos_ids: frozenset[int]
    bos_token: str | None
    add_bos: bool | None  # None: tokenizer_config.json does not say

    @classmethod
    def read(cls, path: FileLookup, config: Mapping[str, Any]) -> SpecialTokens:
        """`config` is config.json. Raises ModelLoadFailed naming the file and the value."""
        names = token_names(path)
        add_bos = optional_json(path / "tokenizer_config.json").get("add_bos_token")
        return cls(
            eos_ids=_end_ids(path, config) | _end_token(path, names.get("eos_token")),
            bos_token=names.get("bos_token"),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )


def token_names(path: FileLookup) -> dict[str, str]:
    """bos_token, eos_token and the like: name -> literal text.

    tokenizer_config.json takes precedence over special_tokens_map.json.
    """
    older = _texts(optional_json(path / "special_tokens_map.json"))
    return older | _texts(optional_json(path / "tokenizer_config.json"))


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text.encode(errors="replace").decode()  # replaces lone surrogates
    return names


def _end_ids(path: FileLookup, config: Mapping[str, Any]) -> frozenset[int]:
    """The eos_token_id of the first of generation_config.json, config.json and its text_config.

    Those of the others are not added: where they differ they are older, and may be ordinary tokens.
    """
    inner = config.get("text_config")
    sources = (
        (path / "generation_config.json", optional_json(path / "generation_config.json")),
        (path / "config.json", config),
        (path / "config.json", inner if isinstance(inner, Mapping) else {}),
    )
    for file, source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            raise ModelLoadFailed(
                f"{file}: eos_token_id is {value!r:.60}, must be a token id or a list of them"
            )
        if ids:
            return frozenset(ids)
    return frozenset()


def _end_token(path: FileLookup, text: str | None) -> frozenset[int]:
    """The id of the tokenizer's eos_token: often the mark at the end of a turn of a chat."""
    if text is None:
        return frozenset()
    listed = optional_json(path / "tokenizer_config.json").get("added_tokens_decoder")
    for token, added in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(added, Mapping) and added.get("content") == text and _ID.fullmatch(token):
            return frozenset({int(token)})
    return _in_tokenizer(optional_json(path / "tokenizer.json"), text)  # large, so read last


def _in_tokenizer(tokenizer: Mapping[str, Any], text: str) -> frozenset[int]:
    """The id of a token in tokenizer.json; invalid parts are left to `tokenizers` to report."""
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and entry.get("content") == text:
            return _id(entry.get("id"))
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, list):  # unigram: [piece, score]
        vocab = {entry[0]: id for id, entry in enumerate(vocab)}
    known = vocab.get(text) if isinstance(vocab, dict) else None
    return _id(known)


def _id(value: Any) -> frozenset[int]:
    sound = isinstance(value, int) and not isinstance(value, bool)
    return frozenset({value}) if sound else frozenset()
