"""The answers of a question as token sequences, and their probabilities. Pure.

An answer of several tokens is as probable as the product of its tokens, each after those before it.
The log-probabilities of its next token are asked for at every `branch`: a sequence of tokens with
which answers begin and after which they go on. The first branch is empty. Where an answer ends at a
branch ("1" of 1 to 10) it has the probability that none of the longer ones ("10") goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

Path = tuple[int, ...]  # token ids
Found = Mapping[Path, Mapping[int, float]]  # the log-probabilities of the next tokens at branches


class Decided(Struct, frozen=True):
    """The probabilities of the labels, in their order, together 1.

    `outside`: the probability that the model writes something else.
    """

    probabilities: tuple[float, ...]
    outside: float


class Answers(Struct, frozen=True):
    """For each label the token sequences that stand for it."""

    paths: tuple[tuple[Path, ...], ...]

    def branches(self) -> dict[Path, tuple[int, ...]]:
        """Returns the tokens that may follow at each branch; the empty branch is the first."""
        found: dict[Path, set[int]] = {(): set()}
        for path in self._all_paths():
            for at, token in enumerate(path):
                found.setdefault(path[:at], set()).add(token)
        return {branch: tuple(sorted(tokens)) for branch, tokens in found.items()}

    def twice(self) -> tuple[int, int] | None:
        """Returns the indices of two labels that share a token sequence; None: all differ."""
        seen: dict[Path, int] = {}
        for index, paths in enumerate(self.paths):
            for path in paths:
                if seen.setdefault(path, index) != index:
                    return seen[path], index
        return None

    def _all_paths(self) -> Iterator[Path]:
        return (path for paths in self.paths for path in paths)


def decided(answers: Answers, found: Found, temperature: float) -> Decided:
    """Returns the probabilities; `temperature` divides the logarithms of those of labels."""
    masses = [_sum_of_logs(_log_mass(path, found) for path in paths) for paths in answers.paths]
    inside = math.exp(_sum_of_logs(masses))
    scaled = [mass / temperature for mass in masses]
    whole = _sum_of_logs(scaled)
    if whole == -math.inf:  # every answer underflows
        return Decided((1 / len(masses),) * len(masses), 1.0)
    return Decided(tuple(math.exp(one - whole) for one in scaled), min(1.0, max(0.0, 1 - inside)))


def _log_mass(path: Path, found: Found) -> float:
    """Returns the logarithm of the probability of `path` without that of longer answers."""
    mass = sum(found[path[:at]][token] for at, token in enumerate(path))
    if path in found:
        longer = sum(math.exp(one) for one in found[path].values())
        mass += math.log1p(-longer) if longer < 1 else -math.inf
    return mass


def _sum_of_logs(logs: Iterable[float]) -> float:
    every = list(logs)
    top = max(every)
    return top if top == -math.inf else top + math.log(sum(math.exp(one - top) for one in every))


def kept_forms(forms: Sequence[Sequence[Path]]) -> tuple[tuple[Path, ...], ...]:
    """Returns for each label its token sequences in the forms that are scored.

    `forms` has for each form a sequence of each label, the expected form first. Another one counts
    where it needs no branches beside those of the expected one: each costs a line to read.
    """
    known = {path[:at] for path in forms[0] for at in range(len(path))}
    kept = [
        form
        for form in forms
        if all(path and known.issuperset(path[:at] for at in range(len(path))) for path in form)
    ]
    return tuple(tuple(dict.fromkeys(paths)) for paths in zip(*(kept or forms[:1]), strict=True))
