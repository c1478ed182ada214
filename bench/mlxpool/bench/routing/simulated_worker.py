"""Simulates a worker: its batch, its prefix cache, and the time of its steps."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import Struct

from mlxpool.bench.routing.loads import Call, Segment

CACHE_BLOCK = 32  # tokens


class Machine(Struct, frozen=True):
    """The speed and the sizes of a worker.

    A step takes `prompt_ms` for each prompt token that it reads. If rows decode, it also takes
    `step_ms`, and `row_ms` for each of these rows.
    """

    batch: int = 8
    prompt_ms: float = 1.0
    step_ms: float = 20.0
    row_ms: float = 2.0
    chunk: int = 256  # most prompt tokens of a step
    cache: int = 32_000  # tokens


class Row(Struct, eq=False):
    """A request that a simulated worker computes."""

    number: int
    call: Call
    came: float  # seconds
    unread: int  # tokens of the prompt that are not yet computed
    left: int  # tokens of the answer that are still to come
    expected: int  # prompt tokens that will be cached, as estimated at the arrival
    cached: int = -1  # cached tokens when the first chunk was read; below 0: not yet read
    first: float = 0.0


class PrefixBlocks:
    """An exact LRU cache of prefixes in blocks of CACHE_BLOCK tokens."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // CACHE_BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.evicted = 0  # tokens

    def found(self, prompt: tuple[Segment, ...]) -> int:
        """Returns the number of cached tokens at the prompt's start, without the last token."""
        length = sum(count for _, count in prompt)
        blocks = sum(1 for _ in itertools.takewhile(self._blocks.__contains__, _blocks(prompt)))
        return min(blocks * CACHE_BLOCK, length - 1)

    def keep(self, prompt: tuple[Segment, ...]) -> None:
        for block in reversed(list(_blocks(prompt))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
            self.evicted += CACHE_BLOCK


def _blocks(prompt: tuple[Segment, ...]) -> list[int]:
    """Returns a key for each full block, equal for prompts that are equal up to the block's end."""
    keys, key, room = [], 0, CACHE_BLOCK
    for name, count in prompt:
        done = 0
        while count - done >= room:
            done += room
            key = hash((key, name, done))
            keys.append(key)
            room = CACHE_BLOCK
        if done < count:
            key, room = hash((key, name, count)), room - (count - done)
    return keys


def _shared(first: tuple[Segment, ...], second: tuple[Segment, ...]) -> int:
    """Returns the number of tokens in full blocks that both prompts have at their start."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(count for (_, count), _ in same) // CACHE_BLOCK * CACHE_BLOCK


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """A worker that reads prompts in chunks, the oldest first, while other requests decode."""

    name: str
    machine: Machine
    rows: list[Row] = field(default_factory=list)
    cache: PrefixBlocks = field(init=False)
    read: int = 0  # prompt tokens that the worker has computed
    busy_until: float = 0.0  # time in seconds at which the present step ends

    def __post_init__(self) -> None:
        self.cache = PrefixBlocks(self.machine.cache)

    @property
    def credit(self) -> int:
        return self.machine.batch - len(self.rows)

    @property
    def unread(self) -> int:
        """The number of prompt tokens that are still to be computed."""
        return sum(row.unread - (row.expected if row.cached < 0 else 0) for row in self.rows)

    def will_find(self, prompt: tuple[Segment, ...]) -> int:
        """Returns how many tokens at the prompt's start the cache will have.

        These tokens are cached now, or will be cached when the running requests have ended.
        """
        there = max((_shared(prompt, row.call.prompt) for row in self.rows), default=0)
        return max(there, self.cache.found(prompt))

    def give(self, number: int, call: Call, came: float) -> Row:
        expected = self.will_find(call.prompt)
        row = Row(number, call, came, call.tokens, max(1, call.output), expected)
        self.rows.append(row)
        return row

    def step(self, now: float) -> tuple[float, list[Row], list[Row], int]:
        """Computes a step from `now` on.

        Returns the time of the step's end, the rows with finished prompts, the ended rows, and the
        number of rows that decoded.
        """
        room, machine = self.machine.chunk, self.machine
        decoding = [row for row in self.rows if row.unread == 0]
        finished: list[Row] = []
        chunk = 0
        for row in self.rows:
            if row.unread and chunk < room:
                if row.cached < 0:
                    row.cached = self.cache.found(row.call.prompt)
                    row.unread -= row.cached
                part = min(row.unread, room - chunk)
                row.unread -= part
                chunk += part
                if not row.unread:
                    finished.append(row)
        self.read += chunk
        ms = machine.prompt_ms * chunk
        if decoding:
            ms += machine.step_ms + machine.row_ms * len(decoding)
        end = now + max(ms, 0.1) / 1000
        ended = []
        for row in (*decoding, *finished):
            if row in finished:
                row.first = end
                self.cache.keep(row.call.prompt)
            row.left -= 1
            if row.left <= 0:
                ended.append(row)
                self.rows.remove(row)
                self.cache.keep((*row.call.prompt, (row.call.answer, row.call.output)))
        self.busy_until = end
        return end, finished, ended, len(decoding)
