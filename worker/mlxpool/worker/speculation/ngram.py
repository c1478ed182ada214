"""Drafts of the tokens that followed the same n-gram earlier in prompt or answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from math import prod

from msgspec import Struct, field

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import NGRAM, Drafts
from mlxpool.worker.speculation.ngram_search import MIN_MATCH, NOWHERE, StreamTokens

MAX_TAKEN = 32768  # the most tokens that a call of `follow` reads
MAX_LEARNED = 8  # the most tokens that a call learns from, because each token may need a search
# Weights of the newest draft in the average of a stream, if the draft is wrong and if it is right.
# A wrong draft costs more than a right draft that was not checked, so averages fall faster than
# they rise.
STREAM_WEIGHT = (0.3, 0.15)
ALL_WEIGHT = 0.03  # weight for the averages of all streams, with which a new stream begins
# Ranges of the length of a match, each with its own average: the shortest length, and the initial
# chance. The length is 0 if a match was continued over a wrong token.
CLASSES = ((0, 0.2), (3, 0.25), (5, 0.45), (9, 0.7), (17, 0.85))
_LONGEST = CLASSES[-1][0]
_CLASS_OF = tuple(
    sum(length >= first for first, _ in CLASSES) - 1 for length in range(_LONGEST + 1)
)


class _Stream(Struct):
    """The state of one sequence. `place`: the position of the next draft in `tokens`.

    `length`: the length of the match that drafts follow. `chances`: the chances of right drafts, by
    class of length.
    """

    tokens: StreamTokens
    chances: list[float]
    place: int = NOWHERE
    length: int = 0  # length of the match before `place`
    known: bool = False  # False after bulk reads, until `place` is searched


class NgramDrafter(Struct):
    """The Drafter of n-grams.

    A match is followed token by token while its drafts are right. After a wrong draft the longest
    match is searched again. If there is none, the wrong draft is skipped, and the next drafts come
    after it.
    """

    name: str = NGRAM
    chances_of_all: list[float] = field(default_factory=lambda: [chance for _, chance in CLASSES])
    _streams: dict[Sequence, _Stream] = field(default_factory=dict)

    def follow(self, seq: Sequence) -> bool:
        """Reads a sequence's new tokens and updates its match; see Drafter."""
        stream = self._streams.get(seq)
        if stream is None:
            stream = self._streams[seq] = _Stream(StreamTokens(), [*self.chances_of_all])
        tokens, prompt = stream.tokens, len(seq.prompt)
        begin, size = len(tokens), prompt + len(seq.ids)
        end = min(size, begin + MAX_TAKEN)
        bulk = min(end, max(prompt, end - MAX_LEARNED))
        if bulk > begin:
            tokens.extend(seq.prompt[begin:bulk])
            tokens.extend(seq.ids[max(0, begin - prompt) : max(0, bulk - prompt)])
            stream.place, stream.known = NOWHERE, False
            begin = bulk
        if end < size:
            return False
        if not stream.known:
            stream.place, stream.length = tokens.longest_match()
            stream.known = True
        if begin < end:
            self._take(stream, seq.ids[begin - prompt : end - prompt])
        return True

    def _take(self, stream: _Stream, ids: Many[int]) -> None:
        """Appends tokens of the answer and learns whether they equal the drafts."""
        tokens, chances, chances_of_all = stream.tokens, stream.chances, self.chances_of_all
        place, length = stream.place, stream.length
        for token in ids:
            right = False
            if place != NOWHERE:
                kind = _CLASS_OF[min(length, _LONGEST)]
                right = tokens[place] == token
                chances[kind] += STREAM_WEIGHT[right] * (right - chances[kind])
                chances_of_all[kind] += ALL_WEIGHT * (right - chances_of_all[kind])
            tokens.append(token)
            if right:
                place, length = place + 1, length + 1
                if length >= MIN_MATCH:
                    continue
            newest, matched = tokens.longest_match()
            if newest != NOWHERE:
                place, length = newest, matched
            elif not right:
                place = place + 1 if place != NOWHERE and length >= MIN_MATCH else NOWHERE
                length = 0
        stream.place, stream.length = place, length

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns the chances of the drafts that come after the tokens in flight; see Drafter.

        The tokens in flight are not known yet. So the first chance also covers that these tokens
        equal the drafts at their positions.
        """
        stream = self._streams.get(seq)
        if stream is None or stream.place == NOWHERE:
            return ()
        first, awaited = stream.length, seq.awaited
        count = awaited + most
        shorter = _CLASS_OF[first : min(first + count, _LONGEST)]
        chances = [stream.chances[kind] for kind in shorter]
        chances += [stream.chances[-1]] * (count - len(chances))
        if awaited and most > 0:
            chances[awaited] *= prod(chances[:awaited])
        return tuple(chances[awaited:])

    def seconds(self, rows: int, depth: int) -> float:
        """Returns 0: drafts are only copied from the tokens of the stream."""
        return 0.0

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """Returns 0: no tokens are left to read before drafts."""
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns copies of the tokens that follow the match; see Drafter."""
        drafts = {}
        for seq, count in depths.items():
            stream = self._streams[seq]
            drafts[seq] = stream.tokens.copied(stream.place, count)
        return drafts

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """Returns (): the chances do not change."""
        return ()

    def reset(self) -> None:
        """Drops the state of all sequences, after `drafts` raised an exception; see Drafter."""
        self._streams.clear()

    def forget(self, seq: Sequence) -> None:
        """Drops the state of a sequence; see Drafter."""
        self._streams.pop(seq, None)
