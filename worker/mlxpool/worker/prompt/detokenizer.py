"""Tokens in, text out: the pure function T(k) of the first k ids of a completion.

After k ids the client has exactly T(k): the bytes of the k ids, minus an incomplete UTF-8 end,
minus the longest tail that may begin a stop string. T is a function of the ids alone and only
grows; what it holds back is released by `finish`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable


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
