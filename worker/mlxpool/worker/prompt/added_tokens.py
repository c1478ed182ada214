"""Adds tokens that tokenizer.json lacks but other files name, and notes contradictions.

The rules are those of transformers: `added_tokens_decoder` of tokenizer_config.json decides how a
token is found in a text, and tokenizer.json decides its id. A token that only tokenizer_config.json
has gets the next id. It is not added if tokenizer_config.json names another id, or if the model has
no embedding for the id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mlxpool.worker.weights.json_files import FileLookup, optional_json
from mlxpool.worker.weights.special_tokens import OLDER_SETTINGS, SETTINGS, texts_of, token_names

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
LISTS = ("additional_special_tokens", "extra_special_tokens")
OLDER_IDS = "added_tokens.json"
MAX_TOLD = 3  # the most named tokens in a note
_ID = re.compile(r"[0-9]{1,9}")

TokenFields = Mapping[str, str | bool]  # arguments of AddedToken


class AddedTokens:
    """The tokens to add to a model's tokenizer.

    `fields`: the properties of each token. `notes`: contradictions between the model's files.
    """

    def __init__(self, files: FileLookup, tokenizer: Tokenizer, rows: int) -> None:
        """`rows`: the number of tokens with an embedding.

        Raises ModelLoadFailed if a file is not JSON.
        """
        self.fields: list[TokenFields] = []
        self._told: dict[str, list[str]] = {}
        self._tokenizer, self._rows = tokenizer, rows
        self._known = tokenizer.get_added_tokens_decoder()
        self._next = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._new: set[str] = set()
        settings = optional_json(files / SETTINGS)
        for id, fields in _listed(settings):
            self._settle(id, fields)
        for text, id in optional_json(files / OLDER_IDS).items():
            self._compare(OLDER_IDS, text, id)
        self._settle_names(token_names(files), settings)
        names, older = token_names(files), optional_json(files / OLDER_SETTINGS)
        for name in ("bos_token", "eos_token"):
            there = texts_of(older.get(name))
            if there and names[name] not in there:
                words = f"{name} is {names[name]!r}, in {OLDER_SETTINGS} {there[0]!r}"
                self._tell(f"{SETTINGS} counts: ", words)

    @property
    def notes(self) -> list[str]:
        """The contradictions between files, a sentence for each type of contradiction."""
        return [_sentence(kind, named) for kind, named in self._told.items()]

    def _tell(self, kind: str, words: str) -> None:
        self._told.setdefault(kind, []).append(words)

    def _settle(self, id: int, fields: TokenFields) -> None:
        text = str(fields["content"])
        have = self._tokenizer.token_to_id(text)
        if have is None:
            if id != self._next or id >= self._rows:
                words = f"{text!r} (id {id})"
                self._tell(f"{SETTINGS} has tokens that tokenizer.json has not, not used: ", words)
                return
            self._add(fields)
            return
        self._compare(SETTINGS, text, id)
        known = self._known.get(have)
        if known is None or any(getattr(known, flag) != fields[flag] for flag in FLAGS):
            self.fields.append(fields)

    def _add(self, fields: TokenFields) -> None:
        """Adds a token without an id; it gets the next id."""
        text = str(fields["content"])
        self._tell(
            "tokenizer.json lacks tokens, which are added as transformers does: ",
            f"{text!r} (id {self._next})",
        )
        self.fields.append(fields)
        self._new.add(text)
        self._next += 1

    def _compare(self, file: str, text: str, id: Any) -> None:
        have = self._tokenizer.token_to_id(text)
        if have is not None and have != id:
            words = f"{text!r} is {have}, in {file} {id!r:.20}"
            self._tell("the ids of tokenizer.json count: ", words)

    def _settle_names(self, names: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """Adds tokens with a name, such as bos_token, that the tokenizer does not have yet."""
        texts = {text: name for name, text in names.items()}
        texts |= {text: name for name in LISTS for text in texts_of(settings.get(name))}
        known = {token.content for token in self._known.values()} | {
            str(fields["content"]) for fields in self.fields
        }
        for text, name in texts.items():
            if text in known or not text:
                continue
            fields: TokenFields = {**dict.fromkeys(FLAGS, False), "content": text, "special": True}
            if self._tokenizer.token_to_id(text) is not None:
                self.fields.append(fields)
            elif self._next < self._rows:
                self._add(fields)
            else:
                self._tell("no token of tokenizer.json, so not used: ", f"{name} {text!r}")


def add(tokenizer: Tokenizer, fields: Sequence[TokenFields]) -> None:
    """Adds these tokens to a tokenizer, or changes how it finds them."""
    if fields:
        tokenizer.add_tokens([AddedToken(**token) for token in fields])  # type: ignore[arg-type]


def _listed(settings: Mapping[str, Any]) -> Iterator[tuple[int, TokenFields]]:
    """Yields the valid entries of added_tokens_decoder in the order of their ids."""
    listed = settings.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, Mapping) else ()
    valid = [
        (int(id), entry)
        for id, entry in entries
        if _ID.fullmatch(id) and isinstance(entry, Mapping)
    ]
    for id, entry in sorted(valid, key=lambda pair: pair[0]):
        text = entry.get("content")
        if isinstance(text, str) and text:
            special = entry.get("special") is True
            flags = {flag: entry.get(flag) is True for flag in FLAGS}
            flags["normalized"] = bool(entry.get("normalized", not special))
            yield id, {"content": text.encode(errors="replace").decode(), **flags}


def _sentence(kind: str, named: list[str]) -> str:
    more = f" and {len(named) - MAX_TOLD} more" if len(named) > MAX_TOLD else ""
    return kind + ", ".join(named[:MAX_TOLD]) + more
