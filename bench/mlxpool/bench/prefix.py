"""The prefix cache: how many tokens of a prompt are cached, compared with mlx-lm's server?

`--disk` measures first tokens after a restart and the cost for other streams, see prefix_disk.

Several conversations take turns. They share a system prompt, and each answer is part of the next
prompt. Each request goes to three contestants with the same model, one after the other: our cache
as a tree, our cache with a single entry, and mlx-lm. mlx-lm's LRUPromptCache is used as in its
server: fetch the nearest entry, generate, insert. Reusable tokens are the longest common prefix
with an earlier sequence of the same contestant, without the last token of the prompt. Stored bytes
are compared with the bytes of the unique tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.bench import mlx_lm, models, prefix_disk
from mlxpool.bench.measurement import OURS, Measurement, Progress
from mlxpool.bench.our_engine import OurEngine, admit, decode
from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence as EngineSequence

SYSTEM_TOKENS = 100  # tokens at the start of each conversation
ANSWER_TOKENS = 40


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    if options.disk:
        return f"{models.named(options)}; conversations of {options.tokens:,} tokens."
    return (
        f"{models.named(options)}; {options.conversations} conversations over {options.turns}"
        f" turns, each growing to {options.tokens:,} tokens."
    )


class Contestant(Protocol):
    name: str
    drawn: int  # tokens at the end of an answer that were drawn but not fed to the model

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """Returns the number of cached tokens, the answer, and the seconds to its first token."""

    def stored(self) -> int:
        """Returns the bytes in the cache."""


class OurCache:
    """Our engine with a prefix cache; `mode` is a value of the setting `prefix_cache`."""

    drawn = 1

    def __init__(self, ours: OurEngine, mode: str, context: int) -> None:
        self.name = OURS if mode == "tree" else f"{mode} entry"
        self.engine = ours.engine(8, context, prefix=mode)

    def begin(self, prompt: list[int]) -> EngineSequence:
        """Admits a prompt; returns its sequence."""
        seq = EngineSequence(b"", 1, tuple(prompt), Options(temperature=0.0), 1, ANSWER_TOKENS)
        admit(self.engine, seq)
        return seq

    def step(self, seq: EngineSequence) -> None:
        """Draws one token; the first step prefills the prompt."""
        decode(self.engine, [seq])

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """Returns the number of cached tokens, the answer, and the seconds to its first token."""
        started = time.perf_counter()
        seq = self.begin(prompt)
        self.step(seq)
        first = time.perf_counter() - started
        for _ in range(ANSWER_TOKENS - 1):
            self.step(seq)
        self.engine.release(seq)
        return seq.cached, list(seq.ids), first

    def stored(self) -> int:
        """Returns the bytes in the cache."""
        return self.engine.memory().prefix


class MlxLmCache:
    """mlx-lm with its server's cache at the server's default size."""

    name = "mlx-lm"
    drawn = 0

    def __init__(self, folder: Path) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self._model = mlx_lm.loaded(folder)
        self._cache = LRUPromptCache(10)

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """Returns the number of cached tokens, the answer, and the seconds to its first token."""
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        started = time.perf_counter()
        cache, rest = self._cache.fetch_nearest_cache("model", prompt)
        cache = cache or make_prompt_cache(self._model)
        tokens = generate_step(
            mx.array(rest), self._model, max_tokens=ANSWER_TOKENS, prompt_cache=cache
        )
        answer = [int(next(tokens)[0])]
        first = time.perf_counter() - started
        answer += [int(token) for token, _ in tokens]
        self._cache.insert_cache("model", [*prompt, *answer], cache)
        return len(prompt) - len(rest), answer, first

    def stored(self) -> int:
        """Returns the bytes in the cache."""
        return int(self._cache.nbytes)


class Score(Struct):
    """The numbers of cached and of reusable tokens of one contestant."""

    reusable: int = 0
    found: int = 0
    first: float = 0.0  # seconds to first tokens, summed over requests
    seen: dict[tuple[int, ...], None] = field(
        default_factory=dict
    )  # all computed sequences, in order

    def share(self) -> float:
        return self.found / self.reusable

    def add(self, prompt: list[int], cached: int, computed: list[int], first: float) -> None:
        """Adds a request, of whose prompt `cached` tokens were in the cache.

        `computed`: those tokens of the answer that the model has read. `first`: seconds to the
        first token.
        """
        best = max((common(old, prompt) for old in self.seen), default=0)
        self.reusable += min(best, len(prompt) - 1)
        self.found += cached
        self.first += first
        self.seen[tuple(prompt + computed)] = None

    def unique_tokens(self) -> int:
        """Counts tokens of all computed sequences, each common prefix once."""
        total, before = 0, ()  # type: tuple[int, tuple[int, ...]]
        for tokens in sorted(self.seen):
            total += len(tokens) - common(before, tokens)
            before = tokens
        return total


def common(left: Iterable[int], right: Iterable[int]) -> int:
    """Returns the length of the longest common prefix."""
    length = 0
    for value, other in zip(left, right, strict=False):
        if value != other:
            break
        length += 1
    return length


def converse(
    contestants: list[Contestant],
    options: argparse.Namespace,
    vocabulary: int,
    progress: Progress,
) -> tuple[dict[str, Score], dict[str, list[list[int]]]]:
    """Runs all turns of all conversations; returns the scores and the final histories."""
    rng = np.random.default_rng(7)
    user_tokens = (options.tokens - SYSTEM_TOKENS) // options.turns - ANSWER_TOKENS  # in each turn
    system = rng.integers(0, vocabulary - 2, SYSTEM_TOKENS).tolist()
    scores = {contestant.name: Score() for contestant in contestants}
    histories = {
        contestant.name: [list(system) for _ in range(options.conversations)]
        for contestant in contestants
    }
    for turn in range(options.turns):
        progress(f"turn {turn + 1} of {options.turns}")
        for number in range(options.conversations):
            words = rng.integers(0, vocabulary - 2, user_tokens).tolist()
            for contestant in contestants:
                history = histories[contestant.name][number]
                history += words
                cached, answer, first = contestant.ask(history)
                computed = answer[: len(answer) - contestant.drawn]
                scores[contestant.name].add(history, cached, computed, first)
                history += answer
    return scores, histories


def memory_of_all(tree: OurCache, histories: list[list[int]]) -> dict[str, int]:
    """Returns the bytes of the prefix cache and of the rows, by name.

    They are measured while one request of each conversation runs.
    """
    running = [tree.begin([*history, 1, 2, 3]) for history in histories]
    for seq in running:
        tree.step(seq)
    memory = tree.engine.memory()
    for seq in running:
        tree.engine.release(seq)
    return {"prefix": memory.prefix, "rows": memory.kv}


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the measurements. Raises ValueError if conversations exceed the model's context."""
    with models.folder(options, progress) as folder:
        if options.disk:
            yield from prefix_disk.measure(folder, options, progress)
        else:
            yield from _in_memory(folder, options, progress)


def _in_memory(
    folder: Path, options: argparse.Namespace, progress: Progress
) -> Iterator[Measurement]:
    progress("loading the model")
    ours = OurEngine(folder)
    context = options.tokens + SYSTEM_TOKENS + 4 * ANSWER_TOKENS
    if context > ours.longest:
        raise ValueError(
            f"--tokens {options.tokens} needs a context of {context}, this model has"
            f" {ours.longest}; give --tokens {ours.longest - context + options.tokens} or less, or"
            " --shape small"
        )
    tree = OurCache(ours, "tree", context)
    contestants: list[Contestant] = [tree, OurCache(ours, "single", context)]
    if not options.no_peers and mlx_lm.installed():
        contestants.append(MlxLmCache(folder))
    scores, histories = converse(contestants, options, ours.vocabulary, progress)
    together = memory_of_all(tree, histories[OURS])
    yield from _measurements(contestants, scores, ours.token_bytes)
    sides = {part: (size / 1e6,) for part, size in together.items()}
    name = f"all {options.conversations} conversations at once"
    yield Measurement("memory at work", name, "MB", sides, compared=False)


def _measurements(
    contestants: Sequence[Contestant], scores: dict[str, Score], token_bytes: int
) -> Iterator[Measurement]:
    Figure = Callable[[Contestant, Score], float]

    def line(name: str, unit: str, digits: int, figure: Figure) -> Measurement:
        sides = {
            contestant.name: (figure(contestant, scores[contestant.name]),)
            for contestant in contestants
        }
        return Measurement("prefix cache", name, unit, sides, digits=digits, compared=unit == "s")

    def share(party: Contestant, score: Score) -> float:
        return party.stored() / (score.unique_tokens() * token_bytes)

    reusable = ", ".join(
        f"{contestant.name} {scores[contestant.name].reusable:,}" for contestant in contestants
    )
    line_found = line(
        "found of reusable prompt tokens", "%", 1, lambda _, score: 100 * score.share()
    )
    yield replace(line_found, note=f"Reusable prompt tokens: {reusable}.")
    yield line("stored", "MB", 1, lambda contestant, _: contestant.stored() / 1e6)
    yield line("stored / unique tokens", "", 3, share)
    times = line("until first tokens, all requests", "s", 1, lambda _, score: score.first)
    yield replace(times, less_is_better=True)
