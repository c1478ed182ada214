"""The bytes of each token, as the tokenizer's own decoder would write them.

A decoder is a chain of named steps. The `DecodeRule` made from it converts each token to bytes
separately, so that text can be streamed: the joined bytes of all tokens are the whole text. If some
bytes are not UTF-8, the valid characters before and after them are kept, also among the byte tokens
of SentencePiece. `tokenizers` instead drops a whole run of such byte tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from tokenizers import Tokenizer

from mlxpool.common.errors import ModelLoadFailed

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = {"type": "ByteLevel"}

# The replacements, in this order, with which a WordPiece decoder cleans up each token.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)

DecodeStep = Callable[[str, bool], str]  # (a token's text, whether it begins the whole text)


class DecodeRule(Struct, frozen=True):
    """The conversion of a token's text in the vocabulary to bytes.

    `literal`: the text of an added token is used as it is, without the steps. `strip`: the number
    of spaces that are removed from the beginning of a whole text.
    """

    steps: tuple[DecodeStep, ...] = ()
    to_bytes: Callable[[str], bytes] = lambda text: text.encode("utf-8", "replace")
    literal: bool = True
    strip: int = 0

    def piece(self, token: str, first: bool) -> bytes:
        for step in self.steps:
            token = step(token, first)
        return self.to_bytes(token)


class TokenBytes:
    """The bytes of every token id; b"" for an unknown id.

    `self[token]` are the bytes that a token adds inside of a text, for example in a completion.
    `whole` returns the text of ids that begin a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ModelLoadFailed with the decoder step that is not supported."""
        self._rule = read_rule(_steps_of(tokenizer))
        self._tokenizer = tokenizer
        self._added = {
            token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._piece(token, first=False)
        return piece

    def whole(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(
            [self._piece(token, True) for token in ids[:1]] + [self[t] for t in ids[1:]]
        )
        text = data.decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._rule.strip) :]

    def _piece(self, token: int, first: bool) -> bytes:
        added = self._added.get(token)
        if added is not None and self._rule.literal:
            return added.encode("utf-8", "replace")
        text = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        return b"" if text is None else self._rule.piece(text, first)


def _steps_of(tokenizer: Tokenizer) -> list[Mapping[str, Any]] | None:
    """Returns the steps of the tokenizer's decoder.

    Without a decoder, returns the step that undoes a byte-level pre-tokenizer; None for any other
    pre-tokenizer.
    """
    if tokenizer.decoder is not None:
        return list(_flat(_settings(tokenizer.decoder), "decoders"))
    if tokenizer.pre_tokenizer is not None:
        before = list(_flat(_settings(tokenizer.pre_tokenizer), "pretokenizers"))
        if any(step.get("type") == "ByteLevel" for step in before):
            return [_BYTE_LEVEL]
    return None


def _settings(part: Any) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = json.loads(part.__getstate__())  # in the form of tokenizer.json
    return settings


def _flat(part: Mapping[str, Any], inner: str) -> Iterator[Mapping[str, Any]]:
    if part.get("type") != "Sequence":
        yield part
        return
    for nested in part.get(inner) or []:
        yield from _flat(nested, inner)


def read_rule(steps: Sequence[Mapping[str, Any]] | None) -> DecodeRule:
    """Returns the DecodeRule of decoder steps; without steps, tokens are words between spaces.

    Raises ModelLoadFailed for a step that cannot be applied token by token.
    """
    if steps is None:
        return DecodeRule((_spaced,), literal=False)
    rule, fused = DecodeRule(), False
    for step in steps:
        kind = str(step.get("type"))
        if kind == "Fuse":
            fused = True
        elif fused and _is_strip(step):
            rule = replace(rule, strip=int(step["start"]))
        elif fused or kind not in _READERS:
            raise ModelLoadFailed(
                f"tokenizer.json: the decoder has a step that is not supported: {dict(step)!r:.200}"
            )
        else:
            rule = _READERS[kind](rule, step)
    return rule


def _is_strip(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Strip" and step.get("content") == " " and not step.get("stop")


def _spaced(token: str, first: bool) -> str:
    return token if first else f" {token}"


def _replacement(rule: DecodeRule, step: Mapping[str, Any]) -> DecodeRule:
    old, new = (step.get("pattern") or {}).get("String"), step.get("content")
    if not isinstance(old, str) or not isinstance(new, str):
        raise ModelLoadFailed(
            f"tokenizer.json: the decoder can replace only plain text: {dict(step)!r:.200}"
        )
    steps = (*rule.steps, lambda token, first: token.replace(old, new))
    return replace(rule, steps=steps)


def _metaspace(rule: DecodeRule, step: Mapping[str, Any]) -> DecodeRule:
    mark, keeps = str(step["replacement"]), step.get("prepend_scheme") == "never"

    def spaces(token: str, first: bool) -> str:
        return token.replace(mark, "" if first and not keeps else " ")

    return replace(rule, steps=(*rule.steps, spaces))


def _word_piece(rule: DecodeRule, step: Mapping[str, Any]) -> DecodeRule:
    prefix, clean_up = str(step["prefix"]), bool(step.get("cleanup"))

    def word(token: str, first: bool) -> str:
        if not first:
            token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        for old, new in _CLEAN_UP if clean_up else ():
            token = token.replace(old, new)
        return token

    return replace(rule, steps=(*rule.steps, word), literal=False)


def _byte_fallback(rule: DecodeRule, step: Mapping[str, Any]) -> DecodeRule:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode("utf-8", "replace")

    return replace(rule, to_bytes=to_bytes)


def _byte_level(rule: DecodeRule, step: Mapping[str, Any]) -> DecodeRule:
    return replace(rule, to_bytes=_from_byte_level)


_READERS: Mapping[str, Callable[[DecodeRule, Mapping[str, Any]], DecodeRule]] = {
    "ByteFallback": _byte_fallback,
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
    "Replace": _replacement,
    "WordPiece": _word_piece,
}


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Returns the byte of each character of byte-level vocabularies; each character is one byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _from_byte_level(piece: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:  # the piece is not byte-encoded
        return piece.encode("utf-8", "replace")
