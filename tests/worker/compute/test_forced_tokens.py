"""Forced tokens are appended together, and answers are the same as with tokens drawn one by one.

The engine then reads several tokens of a row in one pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.constrained_answers import Answer, Answers, constraint, demo, tokens_of
from support.drawn_schemas import SCHEMAS

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.constraints import masks  # noqa: E402
from mlxpool.worker.constraints.constraint import MAX_RUN, Constraint  # noqa: E402
from mlxpool.worker.engine.engine import StepResult  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.context_policy import ContextShift  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

LONG_KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_customer_who_asked": {"type": "string", "maxLength": 6},
        "number_of_items_in_the_order": {"type": "integer", "minimum": 0, "maximum": 99},
        "how_the_order_is_to_be_sent": {"enum": ["by_ordinary_post", "by_express_delivery"]},
    },
    "required": [
        "name_of_the_customer_who_asked",
        "number_of_items_in_the_order",
        "how_the_order_is_to_be_sent",
    ],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "schema": LONG_KEYS}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.8, "repeat_penalty": 1.7, "repeat_last_n": 6},
    {"temperature": 0.9, "logit_bias": {"5": 20.0, "91": -100.0}, "presence_penalty": 1.0},
    {"temperature": 0.7, "logprobs": True, "top_logprobs": 2},
]
BLOCKS = 96
CUTS = range(1, 40, 2)  # values of `max_tokens`
WAYS = [("slabs", False), ("rows", False), ("pool", False), ("pool", True)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats each constraint as quick from the start.

    Forced tokens are computed only for quick constraints.
    """
    monkeypatch.setattr(masks, "QUICK_MASKS", 0)


def make_engine(
    loaded: LoadedModel, layout: str = "slabs", *, ahead: bool = False, prefix: str = "off"
) -> ModelEngine:
    text = demo()[1]
    return model_engine(
        loaded, text, context=512, prefix=prefix, lookahead=ahead, layout=layout, blocks=BLOCKS
    )


class RequestBatch:
    """Runs requests in one batch. Each gets its index as its seed, so every run draws the same."""

    def __init__(self, loaded: LoadedModel, *, layout: str = "slabs", ahead: bool = False) -> None:
        self.batch = Answers(make_engine(loaded, layout, ahead=ahead))

    def run(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        for number, request in enumerate(requests):
            self.batch.admit(number, **request)
        answers = self.batch.run()
        return [answers[number] for number in range(len(requests))]


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constraint, "forced", lambda self, find: [])


def same(found: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    for answer, other in zip(found, wanted, strict=True):
        assert answer.ids == other.ids and answer.text == other.text
        for key in ("reason", "complete", "usage", "code"):
            assert answer.end.get(key) == other.end.get(key)
        assert [entry["id"] for entry in answer.logprobs] == [
            entry["id"] for entry in other.logprobs
        ]


REQUESTS = [
    {**options, "max_tokens": 120, **({"format": FORMAT} if number % 3 else {})}
    for number, options in enumerate(OPTIONS)
]


@pytest.fixture(scope="module")
def single_tokens(loaded: LoadedModel) -> list[Answer]:
    """The answers to REQUESTS whose tokens are drawn one by one."""
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        return RequestBatch(loaded).run(REQUESTS)


@pytest.mark.parametrize(("layout", "ahead"), WAYS)
def test_an_answer_is_that_of_single_tokens(
    loaded: LoadedModel,
    single_tokens: list[Answer],
    layout: str,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Constrained and free rows get the answers of single-token draws, in fewer passes."""
    passes: list[int] = []
    true = ModelEngine.collect

    def collect(engine: ModelEngine) -> StepResult:
        passes.append(1)
        return true(engine)

    monkeypatch.setattr(ModelEngine, "collect", collect)
    answers = RequestBatch(loaded, layout=layout, ahead=ahead).run(REQUESTS)
    together = len(passes)
    alone = RequestBatch(loaded, layout=layout, ahead=ahead)
    alone.run([{**OPTIONS[1], "format": FORMAT, "max_tokens": 120}])
    few = len(passes) - together
    same(answers, single_tokens)
    ids = len(alone.batch.answers[0].ids)
    assert few < 2 * ids // 3, "passes of a row alone"
    for number, answer in enumerate(answers):
        if number % 3:
            assert answer.end["reason"] == "stop"
            jsonschema.validate(json.loads(answer.text), LONG_KEYS)
    with_logprobs = answers[4]
    assert [entry["id"] for entry in with_logprobs.logprobs] == with_logprobs.ids


@settings(max_examples=10)
@given(schemas=st.lists(SCHEMAS, min_size=3, max_size=3), first=st.integers(0, len(OPTIONS) - 1))
def test_any_schema_gives_the_answer_of_single_tokens(
    loaded: LoadedModel, schemas: list[Any], first: int
) -> None:
    requests = [
        {
            **OPTIONS[(first + number) % len(OPTIONS)],
            "format": {"type": "json_schema", "schema": schema},
            "max_tokens": 50,
        }
        for number, schema in enumerate(schemas)
    ]
    layout, ahead = WAYS[first % len(WAYS)]
    answers = RequestBatch(loaded, layout=layout, ahead=ahead).run(requests)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        same(answers, RequestBatch(loaded, layout=layout, ahead=ahead).run(requests))


@settings(max_examples=30)
@given(schema=SCHEMAS, draw=st.randoms(use_true_random=False))
def test_forced_tokens_are_those_that_masks_allow_alone(schema: Any, draw: Any) -> None:
    """Forced tokens are also the same if the tokens before them are replayed, as in a resume."""
    format = {"type": "json_schema", "schema": schema}
    rule, single = constraint(format), constraint(format)
    single._canonical = False  # `single` forces no tokens: it makes each mask
    ids: list[int] = []
    while not rule.finished and len(ids) < 40:
        for token in rule.forced(find=True) or [draw.choice(tokens_of(single.mask()))]:
            if token in demo()[0].eos_ids:
                return
            forced = rule.forced(find=True)
            if forced:
                assert tokens_of(single.mask()) == tokens_of(rule.mask()) == [token] == forced[:1]
                again = constraint(format)
                again.replay(ids)
                assert again.forced(find=True) == forced
            rule.take(token)
            single.take(token)
            ids.append(token)


def test_the_end_may_come_inside_forced_tokens(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests ends by `max_tokens` at each position, and ends by stop strings."""
    requests: list[dict[str, Any]] = [
        {**OPTIONS[0], "format": FORMAT, "max_tokens": count} for count in CUTS
    ]
    words = ["of_the", 'customer_who_asked": ', "asked", "{", "_items", 't"}']
    stops = [{"max_tokens": 120, "stop": [word]} for word in words]
    requests += [{**OPTIONS[1], "format": FORMAT, **stop} for stop in stops]
    answers = RequestBatch(loaded).run(requests)
    cut = len(CUTS)
    assert [len(answer.ids) for answer in answers[:cut]] == [*CUTS]
    assert {answer.end["reason"] for answer in answers[cut:]} == {"stop"}
    assert [answer.end["usage"]["completion_tokens"] for answer in answers] == [
        len(answer.ids) for answer in answers
    ]
    with monkeypatch.context() as patch:
        one_by_one(patch)
        same(answers, RequestBatch(loaded).run(requests))


@pytest.mark.parametrize(("layout", "ahead"), [WAYS[0], WAYS[3]])
def test_an_answer_goes_on_at_any_id(loaded: LoadedModel, layout: str, ahead: bool) -> None:
    request = {**OPTIONS[1], "format": FORMAT, "seed": 3, "max_tokens": 120}
    (whole,) = RequestBatch(loaded).run([request])
    whole_batch = RequestBatch(loaded, layout=layout, ahead=ahead)
    cuts = range(0, len(whole.ids), 2)
    answers = whole_batch.run([{**request, "had": whole.ids[:count]} for count in cuts])
    assert all(answer.ids == whole.ids and answer.end["complete"] for answer in answers)


@pytest.mark.parametrize(("layout", "ahead"), WAYS)
def test_rows_leave_and_come_back_inside_forced_tokens(
    loaded: LoadedModel, layout: str, ahead: bool
) -> None:
    """One row is cancelled, one is preempted; the prefix cache keeps only tokens that were read."""
    request = {**OPTIONS[0], "format": FORMAT, "max_tokens": 120}
    (whole,) = RequestBatch(loaded).run([request])
    engine = make_engine(loaded, layout, ahead=ahead, prefix="tree")
    batch = Answers(engine)
    rows = [batch.admit(number, **request) for number in range(3)]
    while not any(row.unread > 3 for row in rows):
        batch.step()
    batch.generations.release(rows[0])
    rows[0].preempt()
    batch.generations.finish(batch.generations.of(rows[1]), "cancelled")
    answers = batch.run()
    assert answers[0].ids == answers[2].ids == whole.ids
    again = Answers(engine)
    again.admit(7, **request)
    assert again.run()[7].ids == whole.ids


def test_a_full_context_shifts_beside_forced_tokens(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = "([a-c]{1,2} and something that is forced, ){20}end"
    request: dict[str, Any] = {"format": {"type": "regex", "pattern": pattern}}

    def run(*, ahead: bool) -> Answer:
        batch = RequestBatch(loaded, ahead=ahead).batch
        row = batch.admit(7, max_tokens=600, shift=True, num_ctx=48, temperature=0.7, **request)
        row.shift = ContextShift(48, 4, ())
        return batch.run()[7]

    answers = [run(ahead=ahead) for ahead in (False, True)]
    assert answers[0].text.endswith("end") and len(answers[0].ids) > 100
    with monkeypatch.context() as patch:
        one_by_one(patch)
        same(answers, [run(ahead=ahead) for ahead in (False, True)])


def test_a_long_forced_text_is_found_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for forced tokens takes longer for longer texts, so it must not be repeated."""
    requested: list[int] = []
    true = Constraint._find_forced
    text = "lorem ipsum dolor sit amet " * 25

    def count(self: Constraint) -> bool:
        requested.append(not self._forced)
        return true(self)

    monkeypatch.setattr(Constraint, "_find_forced", count)
    format = {"type": "choice", "choices": [text]}
    (answer,) = RequestBatch(loaded).run([{"format": format, "max_tokens": 450}])
    assert answer.text == text and len(answer.ids) > 5 * MAX_RUN
    assert sum(requested) <= 3
