"""How much of each prompt the prefix cache gives back, beside mlx-lm's server cache.

Conversations take turns, each with its own history behind a common system prompt; every answer
goes into the next prompt. Each request is asked of the tree, the single entry and mlx-lm (its
LRUPromptCache as its server uses it: nearest entry, generate, insert) one after the other, on the
same model. Reusable is what some earlier sequence of the same contestant began with, but for the
last token of the prompt. Stored bytes are set against those of the unique tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxpool.bench import mlx_lm
from mlxpool.bench.measurement import OURS, Line
from mlxpool.bench.our_engine import Ours

SYSTEM = 100  # tokens in front of every conversation
ANSWER = 40  # tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens` are those of a conversation at its end."""

    conversations: int = 8
    turns: int = 10
    tokens: int = 4000
    peers: bool = True


class Contestant(Protocol):
    name: str
    drawn: int  # tokens at the end of an answer that were drawn and never computed

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """Tokens found in the cache, the answer, seconds until its first token."""

    def stored(self) -> int:
        """Bytes of what is kept."""


class Tree:
    """Our engine alone; `mode` as the setting `prefix_cache` has it."""

    drawn = 1

    def __init__(self, ours: Ours, mode: str, context: int) -> None:
        self.name = OURS if mode == "tree" else f"{mode} entry"
        self.engine = ours.engine(8, context, prefix=mode)

    def begin(self, prompt: list[int]) -> Any:
        """A sequence whose prompt is computed."""
        from mlxpool.common.options import Options
        from mlxpool.worker.engine.sequence import Sequence

        seq = Sequence(b"", 1, tuple(prompt), Options(temperature=0.0), 1, ANSWER)
        self.engine.admit(seq)
        while self.engine.prefill(seq, self.engine.chunk):
            pass
        return seq

    def step(self, seq: Any) -> None:
        """One more token."""
        (drawn,) = self.engine.decode([seq])
        seq.ids.append(drawn.token)

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """See Contestant."""
        started = time.perf_counter()
        seq = self.begin(prompt)
        self.step(seq)
        first = time.perf_counter() - started
        for _ in range(ANSWER - 1):
            self.step(seq)
        self.engine.release(seq)
        return seq.cached, list(seq.ids), first

    def stored(self) -> int:
        """See Contestant."""
        return self.engine.memory().prefix


class Theirs:
    """mlx-lm, with the cache of its server at the server's default size."""

    name = "mlx-lm"
    drawn = 0

    def __init__(self, folder: Path) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self._model = mlx_lm.loaded(folder)
        self._cache = LRUPromptCache(10)

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """See Contestant."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        started = time.perf_counter()
        cache, rest = self._cache.fetch_nearest_cache("model", prompt)
        cache = cache or make_prompt_cache(self._model)
        tokens = generate_step(mx.array(rest), self._model, max_tokens=ANSWER, prompt_cache=cache)
        answer = [int(next(tokens)[0])]
        first = time.perf_counter() - started
        answer += [int(token) for token, _ in tokens]
        self._cache.insert_cache("model", [*prompt, *answer], cache)
        return len(prompt) - len(rest), answer, first

    def stored(self) -> int:
        """See Contestant."""
        return int(self._cache.nbytes)


@dataclass
class Score:
    """What one contestant got and could have got."""

    reusable: int = 0
    found: int = 0
    first: float = 0.0  # seconds until first tokens, all requests together
    seen: dict[tuple[int, ...], None] = field(default_factory=dict)  # whole sequences computed

    def share(self) -> float:
        return self.found / self.reusable

    def add(self, prompt: list[int], cached: int, computed: list[int], first: float) -> None:
        """One request, of whose answer `computed` went through the model."""
        best = max((common(old, prompt) for old in self.seen), default=0)
        self.reusable += min(best, len(prompt) - 1)
        self.found += cached
        self.first += first
        self.seen[tuple(prompt + computed)] = None

    def unique_tokens(self) -> int:
        """Tokens of all sequences computed so far, each prefix once."""
        total, before = 0, ()  # type: tuple[int, tuple[int, ...]]
        for tokens in sorted(self.seen):
            total += len(tokens) - common(before, tokens)
            before = tokens
        return total


def common(left: Iterable[int], right: Iterable[int]) -> int:
    """The length of the longest common prefix."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def play(
    contestants: list[Contestant], plan: Plan, vocabulary: int, say: Callable[[str], None]
) -> tuple[dict[str, Score], dict[str, list[list[int]]]]:
    """All turns of all conversations; the scores, and the histories at the end."""
    draw = np.random.default_rng(7)
    said = (plan.tokens - SYSTEM) // plan.turns - ANSWER  # by the user, in each turn
    system = draw.integers(0, vocabulary - 2, SYSTEM).tolist()
    scores = {one.name: Score() for one in contestants}
    histories = {one.name: [list(system) for _ in range(plan.conversations)] for one in contestants}
    for turn in range(plan.turns):
        say(f"turn {turn + 1} of {plan.turns}")
        for which in range(plan.conversations):
            words = draw.integers(0, vocabulary - 2, said).tolist()
            for one in contestants:
                history = histories[one.name][which]
                history += words
                cached, answer, first = one.ask(history)
                computed = answer[: len(answer) - one.drawn]
                scores[one.name].add(history, cached, computed, first)
                history += answer
    return scores, histories


def all_at_once(tree: Tree, histories: list[list[int]]) -> dict[str, int]:
    """Bytes of tree and rows while every conversation runs."""
    running = [tree.begin([*history, 1, 2, 3]) for history in histories]
    for seq in running:
        tree.step(seq)
    memory = tree.engine.memory()
    for seq in running:
        tree.engine.release(seq)
    return {"prefix": memory.prefix, "rows": memory.kv}


def measure(folder: Path, plan: Plan, say: Callable[[str], None]) -> Iterator[Line]:
    """One company of conversations. Raises ValueError when they outgrow the model."""
    say("loading the model")
    ours = Ours(folder)
    context = plan.tokens + SYSTEM + 4 * ANSWER
    if context > ours.longest:
        raise ValueError(
            f"--tokens {plan.tokens} needs a context of {context}, this model has {ours.longest};"
            f" give --tokens {ours.longest - context + plan.tokens} or less, or --shape small"
        )
    tree = Tree(ours, "tree", context)
    contestants: list[Contestant] = [tree, Tree(ours, "single", context)]
    if plan.peers and mlx_lm.installed():
        contestants.append(Theirs(folder))
    scores, histories = play(contestants, plan, ours.vocabulary, say)
    together = all_at_once(tree, histories[OURS])
    yield from _lines(contestants, scores, ours.token_bytes)
    sides = {part: (size / 1e6,) for part, size in together.items()}
    name = f"all {plan.conversations} conversations at once"
    yield Line("memory at work", name, "MB", sides, compared=False)


def _lines(
    contestants: Sequence[Contestant], scores: dict[str, Score], token_bytes: int
) -> Iterator[Line]:
    Figure = Callable[[Contestant, Score], float]

    def line(name: str, unit: str, digits: int, figure: Figure) -> Line:
        sides = {one.name: (figure(one, scores[one.name]),) for one in contestants}
        return Line("prefix cache", name, unit, sides, digits=digits, compared=unit == "s")

    def share(one: Contestant, score: Score) -> float:
        return one.stored() / (score.unique_tokens() * token_bytes)

    reusable = ", ".join(f"{one.name} {scores[one.name].reusable:,}" for one in contestants)
    found = line("found of reusable prompt tokens", "%", 1, lambda _, score: 100 * score.share())
    yield replace(found, note=f"Reusable prompt tokens: {reusable}.")
    yield line("stored", "MB", 1, lambda one, _: one.stored() / 1e6)
    yield line("stored / unique tokens", "", 3, share)
    times = line("until first tokens, all requests", "s", 1, lambda _, score: score.first)
    yield replace(times, less_is_better=True)
