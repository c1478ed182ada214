"""The answers of a question as token sequences, and their probabilities. No I/O.

The probability of an answer of several tokens is the product of the probabilities of its tokens,
each after the tokens before it. A `branch` is a token sequence with which an answer begins, but
shorter than the answer; the first branch is empty. The model gives the log-probabilities of the
next token at each branch. If an answer ends at a branch ("1" of 1 to 10), its probability has a
further factor: the probability that the answer does not continue to a longer one ("10").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

Path = tuple[int, ...]  # token ids
Found = Mapping[Path, Mapping[int, float]]  # branch -> log-probabilities of the next tokens


class Decided(Struct, frozen=True):
    """The probabilities of the labels, in their order; their sum is 1.

    `outside`: the probability that the model writes something else.
    """

    probabilities: tuple[float, ...]
    outside: float


class Answers(Struct, frozen=True):
    """The token sequences with which the model may write each label, in the order of the labels."""

    paths: tuple[tuple[Path, ...], ...]

    def branches(self) -> dict[Path, tuple[int, ...]]:
        """Returns the tokens that may follow each branch; the empty branch is the first."""
        followers: dict[Path, set[int]] = {(): set()}
        for path in self._all_paths():
            for at, token in enumerate(path):
                followers.setdefault(path[:at], set()).add(token)
        return {branch: tuple(sorted(tokens)) for branch, tokens in followers.items()}

    def twice(self) -> tuple[int, int] | None:
        """Returns the indices of two labels with a token sequence in common; None: all differ."""
        seen: dict[Path, int] = {}
        for index, paths in enumerate(self.paths):
            for path in paths:
                if seen.setdefault(path, index) != index:
                    return seen[path], index
        return None

    def _all_paths(self) -> Iterator[Path]:
        return (path for paths in self.paths for path in paths)


def decided(answers: Answers, found: Found, temperature: float) -> Decided:
    """Returns the labels' probabilities; `temperature` divides their log-probabilities."""
    masses = [_sum_of_logs(_log_mass(path, found) for path in paths) for paths in answers.paths]
    inside = math.exp(_sum_of_logs(masses))
    scaled = [mass / temperature for mass in masses]
    whole = _sum_of_logs(scaled)
    if whole == -math.inf:  # every answer underflows
        return Decided((1 / len(masses),) * len(masses), 1.0)
    return Decided(tuple(math.exp(mass - whole) for mass in scaled), min(1.0, max(0.0, 1 - inside)))


def _log_mass(path: Path, found: Found) -> float:
    """Returns the log-probability that the answer is `path`, and not a longer answer."""
    mass = sum(found[path[:at]][token] for at, token in enumerate(path))
    if path in found:
        longer = sum(math.exp(log) for log in found[path].values())
        mass += math.log1p(-longer) if longer < 1 else -math.inf
    return mass


def _sum_of_logs(logs: Iterable[float]) -> float:
    terms = list(logs)
    top = max(terms)
    return top if top == -math.inf else top + math.log(sum(math.exp(log - top) for log in terms))


def kept_forms(forms: Sequence[Sequence[Path]]) -> tuple[tuple[Path, ...], ...]:
    """Returns for each label the token sequences that are accepted as the label.

    `forms` has, for each way to write the answers, the token sequence of each label; the expected
    form comes first. The sequences of another form are accepted only if all their branches are
    branches of the first form, because the model would have to compute any further branch.
    """
    branches = {path[:at] for path in forms[0] for at in range(len(path))}
    kept = [
        form
        for form in forms
        if all(path and branches.issuperset(path[:at] for at in range(len(path))) for path in form)
    ]
    return tuple(tuple(dict.fromkeys(paths)) for paths in zip(*(kept or forms[:1]), strict=True))
