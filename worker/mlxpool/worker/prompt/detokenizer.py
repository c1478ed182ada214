"""The incremental detokenizer: computes T(k), the text of the first k token ids of a completion.

After k ids the client has exactly T(k): the bytes of the k ids, minus an incomplete UTF-8 sequence
at the end, minus the longest suffix that may begin a stop string. T depends only on the ids, and
only grows. `finish` releases the text that T holds back.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable


class _StopMatcher:
    """Searches all stop strings together (Aho-Corasick), with one step for each character.

    A state is the longest suffix of the text that begins a stop string; 0: no such suffix.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._edges: dict[int, int] = {}  # state and character -> state
        self._fallback = [0]  # the state of the next shorter suffix that begins a stop string
        self.length = [0]  # characters of the suffix
        self.complete = [0]  # characters of the longest stop string that ends here, else 0
        self._parent = [(0, "")]  # the state and character that lead to a state
        for stop in stops:
            self._add(stop)
        for state in sorted(range(1, len(self.length)), key=self.length.__getitem__):
            self._link(state)
        first_chars = "".join(sorted({stop[0] for stop in stops}))
        self.first_char = re.compile(f"[{re.escape(first_chars)}]")

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
                self._parent.append((state, char))
            state = following
        self.complete[state] = len(stop)

    def _link(self, state: int) -> None:
        parent, char = self._parent[state]
        if parent:
            self._fallback[state] = self.step(self._fallback[parent], char)
        self.complete[state] = self.complete[state] or self.complete[self._fallback[state]]

    def step(self, state: int, char: str) -> int:
        """Returns the state after one more character."""
        code = ord(char)
        while True:
            following = self._edges.get(state << 21 | code)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._fallback[state]


class WholeTexts(dict[int, str | None]):
    """The text of each token by its id; None if the token begins or ends inside a character.

    The texts of `pieces`, the bytes of the first token ids, are made immediately. All other texts
    are made on first use, from the bytes that `piece` returns.
    """

    def __init__(self, piece: Callable[[int], bytes], pieces: Iterable[bytes] = ()) -> None:
        super().__init__(enumerate(map(_whole_text, pieces)))
        self._piece = piece

    def __missing__(self, token: int) -> str | None:
        text = self[token] = _whole_text(self._piece(token))
        return text


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """Converts the tokens of one completion to text, which is released as soon as it is final.

    The text ends before the first stop string. The first complete stop string wins; if several are
    complete at the same character, the longest wins. So the end depends only on the text, neither
    on its split into tokens nor on the order of the stop strings.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        stops: tuple[str, ...],
        texts: WholeTexts | None = None,
    ) -> None:
        """`piece` returns a token's bytes. Completions with the same `piece` may share `texts`."""
        self._piece = piece
        self._texts = WholeTexts(piece) if texts is None else texts
        self._stops = _StopMatcher(stops) if stops else None
        self._between = not stops  # no text is withheld, and no stop string has to be found
        self._state = 0  # state of the matcher
        self._undecoded = b""  # an incomplete UTF-8 sequence
        self._held = ""
        self.stopped = False  # a stop string was completed; no more text is released

    def push(self, token: int) -> str:
        """Appends one id. Returns the text added to T, often ""."""
        if self._between:
            text = self._texts[token]
            if text is not None:  # the usual case
                return text
        return self._append(self._piece(token))

    @property
    def stops(self) -> bool:
        """Whether there are stop strings."""
        return self._stops is not None

    def replay(self, tokens: Iterable[int]) -> str:
        """Appends many ids. Returns the joined texts of `push` for each id."""
        return self._append(b"".join(map(self._piece, tokens)))

    def finish(self) -> str:
        """Returns the withheld text; "" after a stop string. Incomplete UTF-8 becomes U+FFFD."""
        text = self._append(b"", final=True)
        rest, self._held = self._held, ""
        self._state = 0
        return text + rest

    def _append(self, piece: bytes, *, final: bool = False) -> str:
        known = self._undecoded + piece
        new, used = codecs.utf_8_decode(known, "replace", final)
        self._undecoded = known[used:]
        self._between = self._stops is None and not self._undecoded
        return new if self._stops is None else self._release(self._stops, new)

    def _release(self, stops: _StopMatcher, new: str) -> str:
        """Appends decoded text. Returns the text that is final now."""
        if self.stopped:
            return ""
        end, stop = self._scan(stops, new)
        text = self._held + new[:end]
        if stop:
            self.stopped, self._held = True, ""
            return text[: len(text) - stop]
        keep = len(text) - stops.length[self._state]
        self._held = text[keep:]
        return text[:keep]

    def _scan(self, stops: _StopMatcher, new: str) -> tuple[int, int]:
        """Searches `new` up to the end of a stop string.

        Returns the number of searched characters and the length of the stop string, 0 without a
        stop string.
        """
        state, at = self._state, 0
        while at < len(new):
            if not state:
                begin = stops.first_char.search(new, at)
                if begin is None:
                    break
                at = begin.start()
            state = stops.step(state, new[at])
            at += 1
            if stops.complete[state]:
                return at, stops.complete[state]
        self._state = state
        return len(new), 0
