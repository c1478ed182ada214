"""Choices: several completions of one prompt, and the one stream of all of them.

Each choice is a request.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, overload

from msgspec.structs import replace

from mlxpool.client.open_stream import OpenStream
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import reports_prompt
from mlxpool.client.stream import Delta, Result
from mlxpool.common.checks import is_integer, shown
from mlxpool.common.closing import Closing
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import MAX_SEED
from mlxpool.common.protocol import choice
from mlxpool.common.protocol.choice import MAX_CHOICES, Choice
from mlxpool.common.protocol.from_client import GenerateDraft

DRAWN_SEEDS = 2**53  # bound of random seeds: every JSON reader represents them exactly

Item = tuple[int, Delta | None]  # a choice's number and its next delta; None: the choice has ended
Put = Callable[[Item], None]


class Choices(Sequence[Result]):
    """A sequence of the completions of one prompt, in the order of their `index`.

    Choice i has the seed `seed` + i: a `generate` with that seed returns the completion of choice
    i.
    """

    def __init__(self, results: Sequence[Result]) -> None:
        """`results` are in the order of their index, at least one."""
        self._results = tuple(_with_prompt(results))

    @property
    def choices(self) -> tuple[Result, ...]:
        """The completions as a tuple."""
        return self._results

    @property
    def seed(self) -> int:
        """The seed of choice 0, from the request or random."""
        return self._results[0].seed

    @property
    def usage(self) -> Mapping[str, int]:
        """Token counts of all choices together; the prompt counts once."""
        prompt = self._results[0].usage.get("prompt_tokens", 0)
        completion = sum(result.usage.get("completion_tokens", 0) for result in self._results)
        return {
            "prompt_tokens": prompt,
            "cached_tokens": min(result.usage.get("cached_tokens", 0) for result in self._results),
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    @property
    def prompt(self) -> tuple[Mapping[str, Any], ...]:
        """The tokens of the prompt, if the request has echo or prompt_logprobs."""
        return self._results[0].prompt

    @overload
    def __getitem__(self, index: int) -> Result: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Result, ...]: ...

    def __getitem__(self, index: int | slice) -> Result | tuple[Result, ...]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return f"Choices({list(self._results)!r})"


def _with_prompt(results: Sequence[Result]) -> Iterator[Result]:
    """Returns the results, each with the prompt's tokens that choice 0 reports."""
    first = results[0].prompt
    return (replace(result, prompt=first) if first else result for result in results)


def drafts_of(draft: GenerateDraft, n: int) -> list[GenerateDraft]:
    """Returns the `generate` of each of `n` choices. Raises BadRequest unless `n` is 1 to 64.

    Only choice 0 reports log-probabilities of the prompt, because every report needs a full prefill
    of the prompt.
    """
    if not is_integer(n) or not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n is {shown(n)}, must be an integer from 1 to {MAX_CHOICES}")
    options = dict(draft.options)
    seed = options.get("seed")
    if seed is None or (is_integer(seed) and seed < 0):
        seed = int.from_bytes(os.urandom(8), "little") % DRAWN_SEEDS
    if is_integer(seed) and seed <= MAX_SEED < seed + n - 1:
        raise BadRequest(f"seed is {seed}: choice {n - 1} would have {seed + n - 1}, over 2^64 - 1")
    group = os.urandom(16).hex()
    drafts = []
    for index in range(n):
        own = {**options, "seed": seed + index if is_integer(seed) else seed}
        if index and reports_prompt(draft):
            own["prompt_logprobs"] = -1
        settings = dict(draft.settings)
        if n > 1:
            settings[choice.KEY] = Choice(group, index, n).body()
        drafts.append(replace(draft, options=own, settings=settings))
    return drafts


class OpenChoices:
    """The open streams of all choices. The connection's thread passes their items to `put`."""

    def __init__(
        self, connection: AnyConnection, drafts: Sequence[GenerateDraft], put: Put
    ) -> None:
        """Raises TooLarge or BadRequest if the choices cannot be sent; then none is open."""
        self._connection = connection
        self._open: list[OpenStream] = []
        self._held: list[Delta] = []
        self._begun = False
        self.left = len(drafts)  # number of choices that have not ended
        try:
            for number, draft in enumerate(drafts):
                self._open.append(connection.open(draft, partial(_put, put, number)))
        except BaseException:
            self.close()
            raise

    @property
    def ids(self) -> list[bytes]:
        """The ids of the requests, 16 bytes each."""
        return [stream.state.id for stream in self._open]

    def take(self, item: Item) -> list[Delta]:
        """Notes that the reader took an item. Returns the deltas that the reader may have now.

        Deltas are held back until every choice is accepted. If a choice is refused, its error is
        therefore raised before any text. Raises the error of a choice that ends with an error.
        """
        number, delta = item
        if self._connection.took(self._open[number], delta) is None:
            self.left -= 1
        else:
            assert delta is not None
            self._held.append(delta)
        if not self._begun:
            self._begun = all(stream.state.boot or stream.state.result for stream in self._open)
        if not self._begun:
            return []
        ready, self._held = self._held, []
        return ready

    def whole(self) -> Choices:
        """Returns all completions. Raises a choice's first error, and RuntimeError before the end.

        In a forked process it raises BadRequest unless all choices had ended before the fork.
        """
        failed = [stream for stream in self._open if stream.state.error is not None]
        return Choices([self._connection.result(stream) for stream in failed or self._open])

    def close(self) -> None:
        """Cancels the choices that are not finished."""
        for stream in self._open:
            self._connection.leave(stream)

    def abandon(self) -> None:
        """Closes without taking a lock.

        A finalizer calls this method between any two instructions of a thread, which may hold the
        lock.
        """
        for stream in self._open:
            self._connection.abandon(stream)


def _put(put: Put, number: int, delta: Delta | None) -> None:
    put((number, delta))


class ChoicesStream(Closing):
    """An iterator over the deltas of several choices, as they arrive; `index` names the choice.

    No delta arrives before every choice is accepted. An error of one choice is raised, and ends the
    other choices. An unfinished stream is cancelled in the same cases as a `Stream`.
    """

    def __init__(self, connection: AnyConnection, drafts: Sequence[GenerateDraft]) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._choices = OpenChoices(connection, drafts, self._queue.put)

    @property
    def ids(self) -> list[bytes]:
        """The id of each choice's request, 16 bytes."""
        return self._choices.ids

    @property
    def result(self) -> Choices:
        """All completions. Raises the first error of a choice, and RuntimeError before the end."""
        return self._choices.whole()

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self._choices.left:
                self._connection.check_process()
                yield from self._choices.take(self._queue.get())
        finally:
            self.close()

    def read(self) -> Choices:
        """Waits for the end of all choices. Raises the first error of a choice."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Cancels the unfinished choices."""
        self._choices.close()

    def __del__(self) -> None:
        if hasattr(self, "_choices"):  # __init__ has sent the choices
            self._choices.abandon()
