"""Tokens in, text out: the pure function T(k) of the first k ids of a completion.

After k ids the client has exactly T(k): the bytes of the k ids, minus an incomplete UTF-8 end,
minus the longest tail that may begin a stop string. T is a function of the ids alone and only
grows; what it holds back is released by `finish`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this


class TokenBytes:
    """Token id -> bytes, for every id of a vocabulary; an unknown id gives b"".

    Added tokens, special or not, stand for their literal text.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = [b""] * (max(pieces, default=-1) + 1)
        for token, piece in pieces.items():
            self._pieces[token] = piece

    @classmethod
    def from_tokenizer(cls, raw: Mapping[str, Any]) -> TokenBytes:
        """The table of a parsed tokenizer.json: byte-level, or SentencePiece with byte tokens."""
        to_bytes = _from_byte_level if _is_byte_level(raw) else _from_sentencepiece
        pieces = {token: to_bytes(piece) for piece, token in _vocabulary(raw)}
        for added in raw.get("added_tokens") or []:
            pieces[added["id"]] = added["content"].encode("utf-8", "replace")
        return cls(pieces)

    def __getitem__(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def __len__(self) -> int:
        return len(self._pieces)


def _vocabulary(raw: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    vocab = raw["model"]["vocab"]
    if isinstance(vocab, Mapping):
        return vocab.items()
    return ((entry[0], token) for token, entry in enumerate(vocab))  # unigram: [piece, score]


def _is_byte_level(raw: Mapping[str, Any]) -> bool:
    return any(_mentions_byte_level(raw.get(part)) for part in ("decoder", "pre_tokenizer"))


def _mentions_byte_level(part: Any) -> bool:
    if isinstance(part, Mapping):
        nested = [*(part.get("decoders") or []), *(part.get("pretokenizers") or [])]
        return part.get("type") == "ByteLevel" or any(map(_mentions_byte_level, nested))
    return False


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: here is the way back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _from_byte_level(piece: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:  # a piece that was never byte-encoded
        return piece.encode("utf-8", "replace")


def _from_sentencepiece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE_MARK, " ").encode("utf-8", "replace")


@lru_cache(maxsize=1024)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper prefix that is its suffix."""
    borders = [0]
    for char in stop[1:]:
        borders.append(_longer(stop, borders, borders[-1], char))
    return tuple(borders)


def _longer(stop: str, borders: Sequence[int], length: int, char: str) -> int:
    """The longest prefix of `stop` ending the text after `char`, if `length` ended it before."""
    while length and stop[length] != char:
        length = borders[length - 1]
    return length + 1 if stop[length] == char else 0


class Completion:
    """The text of one completion, released as far as T allows.

    A stop string ends the text where it begins. Of several, the one that is complete first wins;
    of those complete at the same character, the longest. So the end depends on the text alone,
    not on how tokens split it nor on the order of the list.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: tuple[str, ...]) -> None:
        self._piece = piece
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._begun = [0] * len(stops)  # characters of each stop that the text ends with
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string was completed; nothing more is released."""
        return self._stopped

    def push(self, token: int) -> str:
        """The text that T gains by this id, often empty."""
        return self._take(self._decoder.decode(self._piece(token)))

    def finish(self) -> str:
        """The text still held back, an incomplete UTF-8 end as U+FFFD; empty after a stop."""
        text = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        self._begun = [0] * len(self._stops)
        return text + rest

    def _take(self, new: str) -> str:
        if self._stopped:
            return ""
        for index, char in enumerate(new):
            stop = self._advance(char) if self._stops else 0
            if stop:
                text = self._held + new[: index + 1]
                self._stopped, self._held = True, ""
                return text[: len(text) - stop]
        return self._release(self._held + new)

    def _advance(self, char: str) -> int:
        """Feeds every stop one character; the length of the longest now complete, else 0."""
        complete = 0
        for number, stop in enumerate(self._stops):
            begun = _longer(stop, self._borders[number], self._begun[number], char)
            self._begun[number] = begun
            if begun == len(stop):
                complete = max(complete, begun)
        return complete

    def _release(self, text: str) -> str:
        keep = len(text) - max(self._begun, default=0)
        self._held = text[keep:]
        return text[:keep]
