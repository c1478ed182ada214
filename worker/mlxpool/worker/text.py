"""Tokens in, text out: the pure function T(k) of the first k ids of a completion.

After k ids the client has exactly T(k): the bytes of the k ids, minus an incomplete UTF-8 end,
minus the longest tail that may begin a stop string. T is a function of the ids alone and only
grows; what it holds back is released by `finish`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
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


class _Stops:
    """Every stop string at once (Aho-Corasick): one step a character, however many there are.

    A state is the longest end of the text that begins a stop; 0: none does.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._edges: dict[int, int] = {}  # state and character -> state
        self._fallback = [0]  # the state of the next shorter end that begins a stop
        self.length = [0]  # characters of that end
        self.complete = [0]  # characters of the longest stop that ends here, else 0
        self._born = [(0, "")]  # from which state, by which character
        for stop in stops:
            self._add(stop)
        for state in sorted(range(1, len(self.length)), key=self.length.__getitem__):
            self._link(state)
        firsts = "".join(sorted({stop[0] for stop in stops}))
        self.beginning = re.compile(f"[{re.escape(firsts)}]")

    def _add(self, stop: str) -> None:
        state = 0
        for length, char in enumerate(stop, 1):
            following = self._edges.get(state << 21 | ord(char))
            if following is None:
                following = len(self.length)
                self._edges[state << 21 | ord(char)] = following
                self._fallback.append(0)
                self.length.append(length)
                self.complete.append(0)
                self._born.append((state, char))
            state = following
        self.complete[state] = len(stop)

    def _link(self, state: int) -> None:
        parent, char = self._born[state]
        if parent:
            self._fallback[state] = self.step(self._fallback[parent], char)
        self.complete[state] = self.complete[state] or self.complete[self._fallback[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        code = ord(char)
        while True:
            following = self._edges.get(state << 21 | code)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fallback[state]


class Completion:
    """The text of one completion, released as far as T allows.

    A stop string ends the text where it begins. Of several, the one that is complete first wins;
    of those complete at the same character, the longest. So the end depends on the text alone,
    not on how tokens split it nor on the order of the list.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: tuple[str, ...]) -> None:
        self._piece = piece
        self._stops = _Stops(stops) if stops else None
        self._state = 0  # of `_stops`
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

    def replay(self, tokens: Iterable[int]) -> str:
        """The text of many ids at once: what `push` gives for them, one after the other."""
        return self._take(self._decoder.decode(b"".join(map(self._piece, tokens))))

    def finish(self) -> str:
        """The text still held back, an incomplete UTF-8 end as U+FFFD; empty after a stop."""
        text = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        self._state = 0
        return text + rest

    def _take(self, new: str) -> str:
        if self._stopped:
            return ""
        if self._stops is None:
            return new
        end, stop = self._scan(self._stops, new)
        text = self._held + new[:end]
        if stop:
            self._stopped, self._held = True, ""
            return text[: len(text) - stop]
        keep = len(text) - self._stops.length[self._state]
        self._held = text[keep:]
        return text[:keep]

    def _scan(self, stops: _Stops, new: str) -> tuple[int, int]:
        """Feeds `new` up to the end of a stop: how much was fed, and the length of the stop."""
        state, at = self._state, 0
        while at < len(new):
            if not state:
                begin = stops.beginning.search(new, at)
                if begin is None:
                    break
                at = begin.start()
            state = stops.step(state, new[at])
            at += 1
            if stops.complete[state]:
                return at, stops.complete[state]
        self._state = state
        return len(new), 0
