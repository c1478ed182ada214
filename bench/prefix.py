"""How much of each prompt the prefix cache gives back, beside mlx-lm's server cache.

    python bench/prefix.py [--conversations 8] [--turns 10] [--tokens 4000] [--json FILE]

Conversations take turns, each with its own history behind a common system prompt; every answer
goes into the next prompt. Each request is asked of the tree, the single entry and mlx-lm (its
LRUPromptCache as its server uses it: nearest entry, generate, insert) one after the other, on the
same small random model. Reusable is what some earlier sequence of the same contestant began with,
but for the last token of the prompt. Stored bytes are set against those of the unique tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import report
from mlxpool.broker.blas import preload

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

SYSTEM = 100  # tokens in front of every conversation
ANSWER = 40  # tokens
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, keys and values, heads, their size, float32


class Contestant(Protocol):
    name: str
    drawn: int  # tokens at the end of an answer that were drawn and never computed

    def ask(self, prompt: list[int]) -> tuple[int, list[int], float]:
        """Tokens found in the cache, the answer, seconds until its first token."""

    def stored(self) -> int:
        """Bytes of what is kept."""


class Ours:
    """The engine alone, without a broker around it."""

    drawn = 1

    def __init__(self, folder: Path, mode: str) -> None:
        from mlxpool.worker.engine.engine import ModelEngine
        from mlxpool.worker.weights.load import inspect, load

        self.name = mode
        self.engine = ModelEngine(load(inspect(folder)), prefix=mode)

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
        from mlx_lm.utils import load_model

        self._model, _ = load_model(folder)
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
    contestants: list[Contestant], conversations: int, turns: int, tokens: int
) -> tuple[dict[str, Score], dict[str, list[list[int]]]]:
    """All turns of all conversations; the scores, and the histories at the end."""
    draw = np.random.default_rng(7)
    said = (tokens - SYSTEM) // turns - ANSWER  # by the user, in each turn
    system = draw.integers(0, 256, SYSTEM).tolist()
    scores = {one.name: Score() for one in contestants}
    histories = {one.name: [list(system) for _ in range(conversations)] for one in contestants}
    for _ in range(turns):
        for which in range(conversations):
            words = draw.integers(0, 256, said).tolist()
            for one in contestants:
                history = histories[one.name][which]
                history += words
                cached, answer, first = one.ask(history)
                computed = answer[: len(answer) - one.drawn]
                scores[one.name].add(history, cached, computed, first)
                history += answer
    return scores, histories


def all_at_once(tree: Ours, histories: list[list[int]]) -> dict[str, int]:
    """Bytes of tree and rows while every conversation runs."""
    running = [tree.begin([*history, 1, 2, 3]) for history in histories]
    for seq in running:
        tree.step(seq)
    memory = tree.engine.memory()
    for seq in running:
        tree.engine.release(seq)
    return {"prefix": memory.prefix, "rows": memory.kv}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One company of conversations."""
    from worker_checkpoints import write_checkpoint

    with tempfile.TemporaryDirectory() as made:
        folder = write_checkpoint(Path(made) / "model", **MODEL)
        tree = Ours(folder, "tree")
        contestants: list[Contestant] = [tree, Ours(folder, "single"), Theirs(folder)]
        size = (options.conversations, options.turns, options.tokens)
        scores, histories = play(contestants, *size)
        rows = [line(one, scores[one.name]) for one in contestants]
        together = all_at_once(tree, histories["tree"])
    head = ("cache", "found of reusable prompt tokens", "stored, MB", "stored / unique tokens")
    print(report.table((*head, "until first tokens, s"), rows))
    print(
        f"\nall {options.conversations} at once: tree {together['prefix'] / 1e6:.1f} MB,"
        f" rows {together['rows'] / 1e6:.1f} MB\n"
    )
    shares = {name: score.share() for name, score in scores.items()}
    stored = {one.name: one.stored() for one in contestants}
    return {"shares": shares, "stored": stored, "at_once": together}


def line(one: Contestant, score: Score) -> tuple[str, ...]:
    stored, unique = one.stored(), score.unique_tokens() * TOKEN_BYTES
    return (
        one.name,
        f"{100 * score.share():.1f} % of {score.reusable:,}",
        f"{stored / 1e6:.1f}",
        f"{stored / unique:.3f}",
        f"{score.first:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000, help="of a conversation at its end")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = preload()
    if environment and "MLXPOOL_BENCH" not in os.environ:  # OpenBLAS has to be there at the start
        os.environ.update(environment, MLXPOOL_BENCH="1")
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print(f"{report.versions()}; {report.machine()}\n")
    report.write(options.json, measure(options))


if __name__ == "__main__":
    main()
