"""Makes tokenizer.json and tokenizer_config.json from a GGUF file's metadata. No MLX.

Two types of vocabulary are supported: `gpt2`, byte-level BPE whose pre-tokenizer is named in the
metadata, and `llama`, SentencePiece's BPE, whose merges follow from the tokens' scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.gguf.fields import Fields

Json = dict[str, Any]

TEMPLATE = "tokenizer.chat_template"
_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of tokens
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> llama.cpp's
_END_ROLES = ("eos", "eot", "eom")
# Control tokens that end an answer even if the metadata lack them: older files name only one end
# token.
_END_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<|return|>", "<|call|>", "<EOT>", "<\uff5cend▁of▁sentence\uff5c>",
    )
)  # fmt: skip
_GLM = ("glm4", "chatglm-bpe")
_GLM_TURNS = ("<|user|>", "<|observation|>")  # texts that begin the next turn
_HARMONY_RETURN, _HARMONY_PART = "<|return|>", "<|end|>"  # the latter ends a part of an answer

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, contractions: str) -> str:
    """Returns a pattern that divides a text into words, in which small letters follow capitals."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    begin = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{begin}{upper}*{lower}+{contractions}|{begin}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# tokenizer.ggml.pre -> the patterns that divide a text, applied one after the other
_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(_GLM, _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "gpt-4o": (_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),),
    "tekken": (_cased_words(r"\p{N}", ""),),
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2.removesuffix(r"|\s+"),
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    ),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # words in the vocabulary stay whole
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a text begins with bos by default
_NORMALISED = ("qwen2", "deepseek-r1-qwen")  # texts are normalised to NFC


def tokenizer_files(fields: Fields) -> dict[str, Json]:
    """Returns contents of tokenizer.json, tokenizer_config.json, generation_config.json by name.

    Raises ModelLoadFailed, with the file and the key, if the vocabulary has another type or lacks
    parts. Ignores `add_eos_token`, because a prompt must not end with the end token.
    """
    vocabulary = _Vocabulary(fields)
    return {
        "tokenizer.json": vocabulary.tokenizer(),
        "tokenizer_config.json": vocabulary.settings(),
        "generation_config.json": {"eos_token_id": vocabulary.end_ids()},
    }


class _Vocabulary:
    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._kind = fields.text(f"{_KEY}model")
        if self._kind not in ("gpt2", "llama"):
            self._refuse(f"the vocabulary {self._kind!r:.60}", "gpt2 and llama")
        self._pre = str(fields.find(f"{_KEY}pre") or "default")
        if self._kind == "gpt2" and self._pre not in PATTERNS:
            self._refuse(f"the pre-tokenizer {self._pre!r:.60}", ", ".join(PATTERNS))
        self._tokens = fields.texts(f"{_KEY}tokens")
        types = f"{_KEY}token_type"
        listed = fields.find(types) is not None
        self._types = fields.integers(types) if listed else [_NORMAL] * len(self._tokens)
        self._require_as_many(types, self._types)
        if self._kind == "llama":
            self._tokens = [
                text.replace("▁", " ") if kind == _USER_DEFINED else text
                for text, kind in zip(self._tokens, self._types, strict=True)
            ]
        self._roles = dict(self._role_tokens())

    def _refuse(self, what: str, known: str) -> NoReturn:
        raise ModelLoadFailed(
            f"{self._fields.file} has {what}, which is not read from GGUF; read are {known}"
        )

    def _require_as_many(self, key: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._tokens):
            raise ModelLoadFailed(
                f"{self._fields.file} has {len(values)} values in {key!r}, must have one for each"
                f" of {len(self._tokens)} tokens"
            )

    def _role_tokens(self) -> Iterator[tuple[str, int]]:
        """Yields roles, such as the end of a text, with the ids of their tokens."""
        for role in dict.fromkeys((*_ROLES.values(), *_END_ROLES)):
            key = f"{_KEY}{role}_token_id"
            if self._fields.find(key) is None:
                continue
            token = self._fields.integer(key)
            if 0 <= token < len(self._tokens):
                yield role, token

    def tokenizer(self) -> Json:
        """Returns the content of tokenizer.json."""
        ids: dict[str, int] = {}
        for token, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind != _UNUSED:
                ids.setdefault(text, token)
        parts = self._byte_level(ids) if self._kind == "gpt2" else self._sentence_piece(ids)
        return {"version": "1.0", "added_tokens": list(self._added(ids)), **parts}

    def _added(self, ids: Mapping[str, int]) -> Iterator[Json]:
        """Yields the added tokens, which are found in a text before pre-tokenization."""
        for token, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            special = kind in (_CONTROL, _UNKNOWN)
            if text and (special or kind == _USER_DEFINED) and ids[text] == token:
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                yield {"id": token, "content": text, "special": special, **flags}

    def _byte_level(self, ids: Mapping[str, int]) -> Json:
        pairs = (merge.partition(" ") for merge in self._fields.texts(f"{_KEY}merges"))
        merges = [[left, right] for left, _, right in pairs if _known(left, right, ids)]
        splits: list[Json] = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in PATTERNS[self._pre]
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        last = {**byte_level, "use_regex": False}
        whole = self._pre in _WHOLE_WORDS
        return {
            "normalizer": {"type": "NFC"} if self._pre in _NORMALISED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": _bpe(ids, merges, ignore_merges=whole),
        }

    def _sentence_piece(self, ids: Mapping[str, int]) -> Json:
        scores = self._fields.numbers(f"{_KEY}scores")
        self._require_as_many(f"{_KEY}scores", scores)
        normal = [token for token, kind in enumerate(self._types) if kind == _NORMAL]
        ranked = sorted(normal, key=lambda token: -scores[token])
        pieces = [self._tokens[token] for token in ranked]
        known = {
            *pieces,
            *(t for t, k in zip(self._tokens, self._types, strict=True) if k == _BYTE),
        }
        unknown = self._roles.get("unknown")
        spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
        strip: list[Json] = []
        if self._fields.flag(f"{_KEY}add_space_prefix", True):
            spaces.insert(0, {"type": "Prepend", "prepend": "▁"})
            strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        undone = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        steps = [undone, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return {
            "normalizer": {"type": "Sequence", "normalizers": spaces},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": _bpe(
                ids,
                list(_merges(pieces, known)),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def settings(self) -> Json:
        """Returns the content of tokenizer_config.json."""
        names = {
            f"{ours}_token": self._tokens[self._roles[theirs]]
            for ours, theirs in _ROLES.items()
            if theirs in self._roles
        }
        begins = self._kind == "llama" or self._pre in _BEGINS
        settings: Json = {
            **names,
            "add_bos_token": self._fields.flag(f"{_KEY}add_bos_token", begins),
            "added_tokens_decoder": {
                str(token): {"content": self._tokens[token]} for token in self._roles.values()
            },
        }
        templates = self._templates()
        return {**settings, "chat_template": templates} if templates else settings

    def _templates(self) -> list[Json]:
        templates = {"default": self._fields.find(TEMPLATE)}
        names = self._fields.find("tokenizer.chat_templates")
        for name in names if isinstance(names, list) else []:
            templates[str(name)] = self._fields.find(f"{TEMPLATE}.{name}")
        return [
            {"name": name, "template": text}
            for name, text in templates.items()
            if isinstance(text, str)
        ]

    def end_ids(self) -> list[int]:
        """Returns the ids of the tokens that end an answer."""
        ends = {self._roles[role] for role in _END_ROLES if role in self._roles}
        texts = {*_END_TEXTS, *(_GLM_TURNS if self._pre in _GLM else ())}
        controls = {
            text: token
            for token, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and text in texts
        }
        if _HARMONY_RETURN in controls:
            controls.pop(_HARMONY_PART, None)
        return sorted(ends | set(controls.values()))


def _known(left: str, right: str, ids: Mapping[str, int]) -> bool:
    return left in ids and right in ids and left + right in ids


def _merges(ranked: Iterable[str], known: set[str]) -> Iterator[list[str]]:
    """For each ranked piece, best first, yields the pairs of known pieces that merge into it.

    The order of a piece's pairs does not matter: a text has only one pair at a position.
    """
    for piece in ranked:
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in known and right in known:
                yield [left, right]


def _bpe(ids: Mapping[str, int], merges: list[list[str]], **settings: Any) -> Json:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    return {
        "type": "BPE",
        **plain,
        "end_of_word_suffix": None,
        **settings,
        "vocab": dict(ids),
        "merges": merges,
    }


def as_json(content: Json) -> bytes:
    """Encodes the content of a file."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
