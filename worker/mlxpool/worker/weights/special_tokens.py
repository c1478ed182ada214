"""Finds the tokens that begin and end a text, in all files that may name these. No MLX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.chat_template_files import find_sources
from mlxpool.worker.weights.json_files import FileLookup, is_present, optional_json, read_file

_ID = re.compile(r"[0-9]{1,10}")
SETTINGS, OLDER_SETTINGS = "tokenizer_config.json", "special_tokens_map.json"
# Texts that end the model's turn in chat templates. Such a text ends an answer if it is in the
# template and is an added token of the tokenizer, even if no file lists it as an end token.
END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>",
    "<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<|assistant_end|>",
    "<end_of_utterance>", "<|end_of_text|>", "<EOT>",
)  # fmt: skip
CHANNELS = "<|channel|>"  # in a template with it, END_OF_TURN ends a message, not the whole turn


class SpecialTokens(Struct, frozen=True):
    """The tokens that begin and end a text. `notes`: contradictions between the files."""

    eos_ids: frozenset[int]
    bos_token: str | None
    add_bos: bool | None  # None: the key is not in tokenizer_config.json
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: FileLookup, config: Mapping[str, Any]) -> SpecialTokens:
        """Reads the files; `config` is the content of config.json.

        Raises ModelLoadFailed with the file and the value.
        """
        settings = optional_json(path / SETTINGS)
        add_bos = settings.get("add_bos_token")
        tokenizer = TokenIds.read(_vocabulary(path / "tokenizer.json"), settings)
        eos_ids, notes = _ends(path, config, tokenizer)
        return cls(
            eos_ids=eos_ids,
            bos_token=token_names(path).get("bos_token"),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            notes=tuple(notes),
        )


class _Model(Struct):
    vocab: Any = None


class _Tokenizer(Struct):
    """The parts of tokenizer.json that name tokens.

    The other parts of a large file, mostly merges, are not decoded.
    """

    model: _Model
    added_tokens: Any = None


def _vocabulary(file: Path) -> Mapping[str, Any]:
    """Returns the parts of tokenizer.json that TokenIds reads.

    Returns the whole content if these parts cannot be decoded alone.
    """
    if not is_present(file):
        return {}
    with suppress(ModelLoadFailed, msgspec.DecodeError, RecursionError):
        parts = msgspec.json.decode(read_file(file), type=_Tokenizer)
        return {"model": {"vocab": parts.model.vocab}, "added_tokens": parts.added_tokens}
    return optional_json(file)


def token_names(path: FileLookup) -> dict[str, str]:
    """Returns the text of each special token by its name, such as bos_token.

    If a name has several texts, the first is returned. tokenizer_config.json takes precedence over
    special_tokens_map.json.
    """
    return {name: texts[0] for name, texts in _names(path).items()}


def _names(path: FileLookup) -> dict[str, list[str]]:
    older = _texts(optional_json(path / OLDER_SETTINGS))
    return older | _texts(optional_json(path / SETTINGS))


def _texts(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    texts_by_name = {
        name: texts_of(value) for name, value in settings.items() if name.endswith("_token")
    }
    return {name: texts for name, texts in texts_by_name.items() if texts}


def texts_of(value: Any) -> list[str]:
    """Returns the texts of one or several tokens, each a text or a map with `content`."""
    if isinstance(value, list):
        return [text for item in value for text in texts_of(item)]
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        return []
    return [text.encode(errors="replace").decode()]  # replaces lone surrogates


class TokenIds(Struct, frozen=True):
    """The ids of a tokenizer's tokens, by the texts of the tokens.

    `added` has the added tokens, `words` the vocabulary.
    """

    added: Mapping[str, int]
    words: Mapping[str, int]

    @classmethod
    def read(cls, tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> TokenIds:
        """Returns the ids in tokenizer.json, and ids that only tokenizer_config.json has.

        `settings` is the content of tokenizer_config.json; its key `added_tokens_decoder` has these
        ids. Ignores invalid parts, which `tokenizers` reports.
        """
        model, listed = tokenizer.get("model"), tokenizer.get("added_tokens")
        words = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(words, list):  # unigram: [piece, score]
            words = {entry[0]: id for id, entry in enumerate(words)}
        words = words if isinstance(words, Mapping) else {}
        older = settings.get("added_tokens_decoder")
        added: dict[str, int] = {}
        for token, entry in older.items() if isinstance(older, Mapping) else ():
            if _ID.fullmatch(token) and isinstance(entry, Mapping):
                text = str(entry.get("content"))
                if text not in words:
                    _add(added, text, int(token))
        for entry in listed if isinstance(listed, list) else ():
            if isinstance(entry, Mapping):
                _add(added, str(entry.get("content")), entry.get("id"))
        return cls(added, words)

    def of(self, text: str) -> frozenset[int]:
        """Returns the id of the token with this text, in a set; empty without such a token."""
        token: Any = self.added.get(text, self.words.get(text))
        return frozenset({token}) if _is_id(token) else frozenset()


def _add(added: dict[str, int], text: str, token: Any) -> None:
    if _is_id(token):
        added[text] = token


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _ends(
    path: FileLookup, config: Mapping[str, Any], tokenizer: TokenIds
) -> tuple[frozenset[int], list[str]]:
    """Returns the ids that end an answer, and notes about contradictions between the files.

    Searches generation_config.json, config.json, and the text_config of config.json. All end ids of
    the first file with end ids are used. From later files, only ids of added tokens are used,
    because such a file may be older and belong to a model with other ids. The end tokens of the
    tokenizer and of the chat template are used, too.
    """
    files, notes = _of_files(path, config)
    ends = next(iter(files.values()), frozenset[int]())
    special = frozenset(tokenizer.added.values())
    named = {
        **{f"eos_token {text!r}": tokenizer.of(text) for text in _names(path).get("eos_token", ())},
        **{
            f"the chat template, with {text!r},": tokenizer.of(text)
            for text in _ends_of_turns(path, tokenizer)
        },
    }
    taken = ends.union(*(ids & special for ids in files.values()), *named.values())
    first = ends or next(filter(None, named.values()), ends)
    if any(ids != ends for ids in files.values()) or any(ids - first for ids in named.values()):
        said = [f"{name} at {_listed(ids)}" for name, ids in {**files, **named}.items() if ids]
        notes.append(
            f"files end a text differently: {'; '.join(said)}. An answer ends at {_listed(taken)}"
        )
    for name, ids in files.items():
        if words := ids - taken:
            notes.append(
                f"{name}: eos_token_id {_listed(words)} does not end answers, because it is an"
                " ordinary token"
            )
    if not taken:
        notes.append("no file names a token that ends a text: answers end at max_tokens")
    if lost := ends - special:  # an end token is seldom a plain word
        spelt = {token for token in tokenizer.words.values() if _is_id(token)}
        if (special or spelt) and (lost := lost - spelt):
            notes.append(f"eos_token_id {_listed(lost)} is no id of tokenizer.json")
    return taken, notes


def _of_files(
    path: FileLookup, config: Mapping[str, Any]
) -> tuple[dict[str, frozenset[int]], list[str]]:
    """Returns the eos_token_id of each file with this key, in the order of precedence, and notes.

    Raises ModelLoadFailed if the first id is invalid; a later invalid id only adds a note.
    """
    inner = config.get("text_config")
    sources = (
        ("generation_config.json", optional_json(path / "generation_config.json")),
        ("config.json", config),
        ("text_config of config.json", inner if isinstance(inner, Mapping) else {}),
    )
    ids_by_file: dict[str, frozenset[int]] = {}
    notes = []
    for name, source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(_is_id, ids)):
            fault = f"{path / name.split()[-1]}: eos_token_id is {value!r:.60}, must be a token id"
            if not ids_by_file:
                raise ModelLoadFailed(f"{fault} or a list of them")
            notes.append(f"{fault} or a list of them; it is left out")
        elif ids:
            ids_by_file[name] = frozenset(ids)
    return ids_by_file, notes


def _ends_of_turns(path: FileLookup, tokenizer: TokenIds) -> list[str]:
    """Returns the texts of the tokens that end a turn in the chat templates."""
    try:
        sources = find_sources(path).texts.values()
    except ModelLoadFailed:
        return []  # the reader of the templates reports the error
    if any(CHANNELS in source for source in sources):
        return []
    return [
        text
        for text in END_OF_TURN
        if text in tokenizer.added and any(text in source for source in sources)
    ]


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ids)))
