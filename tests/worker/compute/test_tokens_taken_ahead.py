"""Tests constraints that advance by drawn tokens before the tokens are committed."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from support.constrained_answers import Answer, Answers, demo

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.constraints import masks  # noqa: E402
from mlxpool.worker.constraints.masks import Masks  # noqa: E402
from mlxpool.worker.engine.flight import PassTimes  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.rows import Rows  # noqa: E402
from mlxpool.worker.sampling.batch import SampledNumbers, sampled_tokens  # noqa: E402
from mlxpool.worker.scheduling.sequence import SampledToken  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

LONG_KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_customer": {"type": "string", "maxLength": 8},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name_of_the_customer", "number_of_items"],
    "additionalProperties": False,
}
REQUESTS: list[dict[str, Any]] = [
    {"format": {"type": "json_schema", "schema": LONG_KEYS}, "temperature": 0.9},
    {"temperature": 0.7},
    {"format": {"type": "json"}, "temperature": 1.0, "max_tokens": 23},
    {"format": {"type": "choice", "choices": ["perhaps not", "yes"]}, "temperature": 0.0},
    {"format": {"type": "regex", "pattern": "[a-z]{9,30}"}, "stop": ["e", "i"], "temperature": 1.0},
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


@pytest.fixture(params=["runs", "single tokens"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Makes drawn tokens available early.

    Yields a list that gets, for each call of `take_ahead`, the number of tokens taken ahead.
    """

    def drawn(engine: ModelEngine) -> list[SampledToken] | None:
        flight = engine.inspect().flights[0]
        if flight.sampled is None or flight.checks or flight.sampled.logprobs is not None:
            return None
        flight.wait()
        tokens: Any = flight.sampled.tokens.tolist()
        return sampled_tokens(SampledNumbers(tokens), flight.rows)[0]

    counts: list[int] = []
    true = Masks.take_ahead

    def take_ahead(self: Masks, tokens: Any, least: int) -> None:
        true(self, tokens, least)
        counts.append(0 if self._ahead is None else len(self._ahead.tokens))

    monkeypatch.setattr(ModelEngine, "drawn", drawn)
    monkeypatch.setattr(Masks, "take_ahead", take_ahead)
    monkeypatch.setattr(masks, "QUICK_MASKS", 0)
    monkeypatch.setattr(masks, "MAX_WAIT", 60.0)
    if request.param == "single tokens":
        monkeypatch.setattr("mlxpool.worker.compute.constrained_rows.MIN_RUN", 99)
        monkeypatch.setattr("mlxpool.worker.compute.constrained_rows.MIN_RUN_OF_ALL", 99)
    yield counts


def batch(loaded: LoadedModel) -> Answers:
    engine = model_engine(
        loaded, demo()[1], context=512, prefix="off", lookahead=True, layout="pool", blocks=96
    )
    return Answers(engine)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Answer]:
    """The answer of each request, computed alone without tokens taken ahead."""
    answers = []
    for number, options in enumerate(REQUESTS):
        rows = batch(loaded)
        rows.admit(number, **options)
        answers.append(rows.run()[number])
    return answers


def same(found: dict[int, Answer], wanted: list[Answer]) -> None:
    for number, answer in enumerate(wanted):
        other = found[number]
        assert (other.ids, other.text) == (answer.ids, answer.text)
        for key in ("reason", "complete", "usage"):
            assert other.end.get(key) == answer.end.get(key)


def test_every_row_gets_what_it_gets_alone(
    loaded: LoadedModel, alone: list[Answer], taken: list[int]
) -> None:
    rows = batch(loaded)
    for number, options in enumerate(REQUESTS):
        rows.admit(number, **options)
    same(rows.run(), alone)
    assert max(taken) >= 3
    maker = rows.steps.constrained.mask_maker
    for job in maker._unread:  # masks begun after the last tokens of answers
        assert job.wait(monotonic() + 60)
    maker._drop_unwanted()
    assert not maker._unread


@pytest.mark.parametrize(("part", "fails"), [(Rows, "submitted"), (PassTimes, "ended")])
def test_a_pass_that_fails_gives_the_tokens_back(
    loaded: LoadedModel,
    alone: list[Answer],
    taken: list[int],
    part: type,
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The constraints give back the tokens that they took ahead, so all answers stay the same.

    If the failed pass read prompts, all rows are read again.
    """
    rows = batch(loaded)
    for number, options in enumerate(REQUESTS[:3]):
        rows.admit(number, **options)
    failed: list[int] = []
    true = getattr(part, fails)

    def failing(*args: Any) -> Any:
        ahead = rows.steps.constrained.mask_maker._ahead
        if ahead is not None and not failed and len(rows.answers) > 3:
            failed.append(len(ahead.tokens))
            raise RuntimeError("the pass failed")
        return true(*args)

    monkeypatch.setattr(part, fails, failing)
    for _ in range(9):
        rows.step()
    for number, options in enumerate(REQUESTS[3:], 3):
        rows.admit(number, **options)
    same(rows.run(), alone)
    assert failed, "no pass failed whose tokens were taken ahead"
