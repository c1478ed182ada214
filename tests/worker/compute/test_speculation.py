"""Answers with drafts equal answers without: ids, text, log-probabilities and end.

Tests every drafter with random numbers of drafts. An oracle drafter mixes right and wrong drafts,
see support/drafting.py.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.constrained_answers import PROMPT, Answer, Answers, demo
from support.draft_models import write_draft
from support.drafting import EagerSpeculator, OracleDrafter
from support.predicting_models import EVERY, FAMILIES, write_predicting

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.protocol.deltas import Delta  # noqa: E402
from mlxpool.worker.compute.drafting_rows import (  # noqa: E402
    MAX_FAILURES,
    make_drafter,
    make_speculator,
    one_each,
)
from mlxpool.worker.draft_model.engine import DraftModelEngine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.context_policy import ContextShift  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.speculation.best_drafter import (  # noqa: E402
    MAX_FAILURES as BEST_FAILURES,
)
from mlxpool.worker.speculation.drafter import Drafter  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from mlxpool.worker.weights.locate import DEMO_FOLDER  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

DEMO, DRAFT_MODEL = "demo", "its draft model"
OF_DEMO = [(DEMO, layout) for layout in ("rows", "slabs", "pool")]
OF_HEADS = [
    (f"{family}, {kind}", layout)
    for family, layout in [
        *((family, "rows") for family in FAMILIES),
        ("glm4_moe_lite", "pool"),
        ("llama", "rows"),
        ("llama", "slabs"),
    ]
    for kind in ("right", "wrong")
]
OF_HEADS.append(("demo, with its head", "slabs"))
# The models and layouts of each drafter: a value of the setting `speculation`, or "oracle".
DRAFTERS = {
    "oracle": OF_DEMO,
    "ngram": OF_DEMO,
    "mtp": OF_HEADS,
    "draft": OF_DEMO,
    "auto": [*OF_DEMO, *OF_HEADS],
}
REPEATING = "a = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2"
CONTEXT = 40  # tokens of context of a request that shifts
FORMATS: list[dict[str, Any]] = [
    {"type": "regex", "pattern": "([a-z]{2,6}, ){4,9}end"},
    {"type": "choice", "choices": ["yes, of course", "no, never", "perhaps not today"]},
    {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 4},
            },
            "required": ["name", "tags"],
            "additionalProperties": False,
        },
    },
    {"type": "json"},
]

OPTIONS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.2])},
    optional={
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.just(0.05),
        "repeat_penalty": st.sampled_from([0.8, 1.4]),
        "repeat_last_n": st.sampled_from([-1, 0, 1, 6]),
        "presence_penalty": st.sampled_from([-0.5, 0.9]),
        "frequency_penalty": st.sampled_from([0.4]),
        "logit_bias": st.just({"11": 3.0, "16": -100.0}),
        "stop": st.sampled_from([["\n\n"], ["e", ")("], ["1, 2, 3, 1"]]),
        "logprobs": st.just(True),
        "ignore_eos": st.just(True),
        "seed": st.integers(0, 2**64 - 1),
    },
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([PROMPT, REPEATING, "x"]),
        "max_tokens": st.integers(1, 40),
        "options": OPTIONS,
        "format": st.none() | st.sampled_from(FORMATS),
        "shifts": st.booleans(),
        "had": st.integers(0, 30),  # ids of an earlier run
    }
)


class Models(dict[str, LoadedModel]):
    """Loaded models by name."""

    def __repr__(self) -> str:  # shown in failing examples
        return f"Models of {', '.join(self)}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The demo model, its draft model, and models with heads, which have the demo's vocabulary.

    The drafts of a head are mostly "right" or mostly "wrong".
    """
    root, size = tmp_path_factory.mktemp("models"), demo()[0].plan.vocab_size
    loaded = Models(
        {DEMO: load(demo()[0]), DRAFT_MODEL: load(inspect(write_draft(root / "draft")))}
    )
    loaded["demo, with its head"] = load(inspect(DEMO_FOLDER, predicts=True))
    for family in EVERY:
        for kind in ("right", "wrong"):
            path, right = root / family / kind, kind == "right"
            write_predicting(path, family, 1, right=right, vocab_size=size)
            loaded[f"{family}, {kind}"] = load(inspect(path, predicts=True))
    return loaded


def admit(batch: Answers, number: int, request: dict[str, Any], had: Any = ()) -> Sequence:
    options = dict(request["options"])
    if request["format"] is not None:
        options["format"] = request["format"]
        options.pop("ignore_eos", None)  # not allowed with a format
    if request["shifts"]:
        options |= {"shift": True, "num_ctx": CONTEXT, "num_keep": 2}
    row = batch.admit(
        number, prompt=request["prompt"], max_tokens=request["max_tokens"], had=had, **options
    )
    if request["shifts"]:
        row.shift = ContextShift(CONTEXT, 2)
        row.discarded = row.shift.discarded(len(row.prompt) + len(row.ids))
    return row


def engine(
    models: Models,
    layout: str,
    *,
    model: str = DEMO,
    drafter: str = "",
    lookahead: bool = False,
) -> ModelEngine:
    """Returns an engine; with the drafter "draft" or "auto" it has a draft model.

    The draft model has five rows, fewer than there are requests.
    """
    draft = None
    if drafter in ("draft", "auto"):
        draft = DraftModelEngine(models[DRAFT_MODEL], demo()[2], rows=5, limit=0)
    return model_engine(
        models[model],
        demo()[1],
        layout=layout,
        lookahead=lookahead,
        blocks=32,
        prefix_bytes=2**20,
        draft=draft,
    )


def eager(name: str, made: ModelEngine, draw: random.Random | None = None) -> EagerSpeculator:
    """Returns a speculator that makes every row check drafts, even if they save no time."""
    return EagerSpeculator(make_drafter(name, made, monotonic), draw)


def answers_of(batch: Answers, requests: list[dict[str, Any]]) -> dict[int, Answer]:
    """The answers to some requests, all in one batch."""
    for number, request in enumerate(requests):
        admit(batch, number, request)
    return batch.run()


def require_same(found: Answer, wanted: Answer, had: int = 0) -> None:
    assert found.ids == wanted.ids
    ours, others = dict(found.end), dict(wanted.end)
    for end in (ours, others):
        for key in ("timings_ms", "usage"):
            end.pop(key, None)
    if had:
        ours.pop("text", None), others.pop("text", None)
        assert wanted.text.endswith(found.text)
    else:
        assert found.text == wanted.text
    assert ours == others
    for entry, other in zip(found.logprobs[::-1], wanted.logprobs[::-1], strict=False):
        assert entry["id"] == other["id"]
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    assert len(found.logprobs) == max(0, len(wanted.logprobs) - had)


@pytest.mark.parametrize("name", DRAFTERS)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    place=st.integers(0, 29),  # the index of a model and a layout
    requests=st.lists(REQUESTS, min_size=1, max_size=4),
    lookahead=st.booleans(),
    seed=st.integers(0, 2**32),
    disturbs=st.integers(0, 12),
)
def test_answers_are_the_same_with_drafts(
    models: Models,
    name: str,
    place: int,
    requests: list[dict[str, Any]],
    lookahead: bool,
    seed: int,
    disturbs: int,
) -> None:
    """Requests are resumed at any id, preempted while they run, and run beside a cancelled row.

    A draft model also loses its rows while requests run.
    """
    model, layout = DRAFTERS[name][place % len(DRAFTERS[name])]
    plain = Answers(engine(models, layout, model=model))
    wanted = answers_of(plain, requests)
    draw = random.Random(seed)
    drafting_engine = engine(models, layout, model=model, drafter=name, lookahead=lookahead)
    drafter: Drafter
    if name == "oracle":
        known = {bytes([number] * 16): answer.ids for number, answer in wanted.items()}
        known[bytes([9] * 16)] = [1] * 20
        drafter = OracleDrafter(known, draw, plain.engine.vocab_size)
    else:
        drafter = make_drafter(name, drafting_engine, monotonic)
        assert drafter.name == name
    batch = Answers(drafting_engine, EagerSpeculator(drafter, draw))
    had = [
        min(request["had"], max(0, len(wanted[number].ids) - 1))
        if "code" not in wanted[number].end
        else 0
        for number, request in enumerate(requests)
    ]
    rows = [
        admit(batch, number, request, wanted[number].ids[: had[number]])
        for number, request in enumerate(requests)
    ]
    beside = batch.admit(9, prompt="y", max_tokens=60, ignore_eos=True)
    for _ in range(disturbs):
        batch.step()
    if beside in batch.generations.sequences():
        batch.generations.finish(batch.generations.of(beside), "cancelled")
    if drafting_engine.draft is not None:
        drafting_engine.draft.make_room(1)
    live = [row for row in rows if row in batch.generations.sequences()]
    if live and not batch.steps.in_flight:
        batch.generations.release(live[0])
        live[0].preempt()
    answers = batch.run()
    for number in range(len(requests)):
        require_same(answers[number], wanted[number], had[number])
    assert drafting_engine.kv_use()[0] == 0
    drafting_engine.prefix.clear()
    assert drafting_engine.blocks.available == drafting_engine.blocks.capacity


REQUESTED: list[dict[str, Any]] = [
    {"prompt": REPEATING, "options": {"temperature": 0.0, "logprobs": True}, "format": None},
    {"prompt": PROMPT, "options": {"temperature": 0.9, "seed": 5}, "format": FORMATS[0]},
    {"prompt": PROMPT, "options": {"temperature": 0.8, "repeat_penalty": 1.2}, "format": None},
    {"prompt": REPEATING, "options": {"temperature": 0.0}, "format": FORMATS[2]},
]


def requested(number: int) -> dict[str, Any]:
    return {**REQUESTED[number], "max_tokens": 60, "shifts": False}


@pytest.fixture(scope="module")
def plain_answers(models: Models) -> Callable[[str], dict[int, Answer]]:
    """The answers of the demo model to REQUESTED without drafts, by layout."""

    @functools.cache
    def found(layout: str) -> dict[int, Answer]:
        requests = [requested(number) for number in range(len(REQUESTED))]
        return answers_of(Answers(engine(models, layout)), requests)

    return found


def run(batch: Answers, requests: list[dict[str, Any]]) -> tuple[dict[int, Answer], int]:
    """The answers to some requests, and the number of their steps."""
    for number, request in enumerate(requests):
        admit(batch, number, request)
    steps = 0
    while len(batch.generations):
        batch.step()
        steps += 1
    return batch.run(), steps


@pytest.mark.parametrize(("layout", "lookahead"), [("slabs", False), ("pool", True)])
def test_right_drafts_save_steps(models: Models, layout: str, lookahead: bool) -> None:
    """Tests rows with and without a format; a step with drafts is the only step in flight."""
    requests = [requested(number) for number in range(len(REQUESTED))]
    wanted, plain_steps = run(Answers(engine(models, layout, lookahead=lookahead)), requests)
    known = {bytes([number] * 16): answer.ids for number, answer in wanted.items()}
    speculator = EagerSpeculator(OracleDrafter(known, random.Random(7), 4096))
    answers, steps = run(Answers(engine(models, layout, lookahead=lookahead), speculator), requests)
    for number, answer in wanted.items():
        require_same(answers[number], answer)
    assert speculator.accepted > 60 and speculator.accepted > speculator.drafted / 4
    assert steps < 0.7 * plain_steps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_right_head_saves_steps(models: Models, family: str, lookahead: bool) -> None:
    """Runs three rows in one batch: one greedy, one sampled, one with penalties."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": True},
        {"temperature": 0.1, "seed": 4},
        {"temperature": 0.0, "repeat_penalty": 1.1},
    ]
    requests = [
        {
            "prompt": PROMPT,
            "max_tokens": 60,
            "options": {**each, "ignore_eos": True},
            "format": None,
            "shifts": False,
        }
        for each in options
    ]
    model = f"{family}, right"
    wanted = answers_of(Answers(engine(models, "rows", model=model)), requests)
    drafting_engine = engine(models, "rows", model=model, lookahead=lookahead)
    speculator = eager("mtp", drafting_engine)
    answers, steps = run(Answers(drafting_engine, speculator), requests)
    for number, answer in answers.items():
        require_same(answer, wanted[number])
    assert speculator.checks > 0 and speculator.accepted > 0.5 * speculator.drafted
    tokens = sum(len(answer.ids) for answer in wanted.values())
    assert tokens == 180 and speculator.accepted > 60 and steps < 60


@pytest.mark.parametrize("setting", ["ngram", "draft", "auto"])
@pytest.mark.parametrize(("layout", "lookahead"), [("slabs", False), ("pool", True)])
def test_drafts_of_the_demo_model_are_right(
    models: Models,
    plain_answers: Callable[[str], dict[int, Answer]],
    setting: str,
    layout: str,
    lookahead: bool,
) -> None:
    """Many drafts are right, and the answers are the same as without drafts."""
    requests = [requested(number) for number in range(len(REQUESTED))]
    wanted = plain_answers(layout)
    drafting_engine = engine(models, layout, drafter=setting, lookahead=lookahead)
    speculator = eager(setting, drafting_engine)
    answers = answers_of(Answers(drafting_engine, speculator), requests)
    for number, answer in wanted.items():
        require_same(answers[number], answer)
    assert speculator.accepted > 20 and speculator.accepted > speculator.drafted / 10
    assert (drafting_engine.memory().draft > models[DRAFT_MODEL].weight_bytes) == (
        setting != "ngram"
    )
    drafting_engine.close()


@pytest.mark.parametrize(
    ("setting", "model"),
    [
        ("ngram", DEMO),
        ("mtp", "glm4_moe_lite, right"),
        ("mtp", "qwen3_next, right"),
        ("draft", DEMO),
        ("auto", DEMO),
        ("auto", "glm4_moe_lite, right"),
        ("auto", "qwen3_next, right"),
    ],
)
def test_the_speculator_of_each_setting_gives_the_same_answers(
    models: Models, plain_answers: Callable[[str], dict[int, Answer]], setting: str, model: str
) -> None:
    """The test does not check the number of drafts, because it depends on the clock."""
    layout = "slabs" if model == DEMO else "rows"
    requests = [requested(number) for number in range(len(REQUESTED))]
    if model == DEMO:
        wanted = plain_answers(layout)
    else:  # this model cannot complete a format in so few tokens
        requests = [{**request, "format": None} for request in requests[:3]]
        wanted = answers_of(Answers(engine(models, layout, model=model)), requests)
    drafting_engine = engine(models, layout, model=model, drafter=setting)
    if drafting_engine.draft is not None:
        drafting_engine.draft.warm_up(lambda: None)
    speculator = make_speculator(setting, drafting_engine, "some")
    assert speculator is not None and speculator.drafter.name == setting
    for number, answer in answers_of(Answers(drafting_engine, speculator), requests).items():
        require_same(answer, wanted[number])


def test_a_draft_model_that_fails_disturbs_no_answer(
    models: Models,
    plain_answers: Callable[[str], dict[int, Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a few failures in a row the draft model is not used any more."""
    requests = [requested(number) for number in range(len(REQUESTED))]
    wanted = plain_answers("slabs")
    drafting_engine = engine(models, "slabs", drafter="draft")
    asked = []

    def fails(*_: Any) -> None:
        asked.append(1)
        raise RuntimeError("the draft model fails")

    monkeypatch.setattr(DraftModelEngine, "propose", fails)
    answers = answers_of(Answers(drafting_engine, eager("draft", drafting_engine)), requests)
    for number, answer in wanted.items():
        require_same(answers[number], answer)
    assert len(asked) == MAX_FAILURES


def test_other_drafts_go_on_where_the_draft_model_fails(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting_engine = engine(models, "slabs", drafter="auto")
    asked = []

    def fails(*_: Any) -> None:
        asked.append(1)
        raise RuntimeError("the draft model fails")

    monkeypatch.setattr(DraftModelEngine, "propose", fails)
    speculator = eager("auto", drafting_engine)
    batch = Answers(drafting_engine, speculator)
    row = batch.admit(1, prompt=REPEATING, temperature=0.0, max_tokens=40, ignore_eos=True)
    batch.run()
    assert len(asked) == BEST_FAILURES and len(row.ids) == 40
    assert batch.steps.drafting.speculator is speculator and speculator.accepted > 0


def test_wrong_drafts_are_in_no_cached_prefix(models: Models) -> None:
    """A later prompt that contains the answer finds the answer's keys, but no keys of drafts."""
    batch = Answers(engine(models, "slabs"), EagerSpeculator())
    row = batch.admit(1, prompt=REPEATING, temperature=0.0, max_tokens=30, ignore_eos=True)
    answer = batch.run()[1].ids
    speculator = batch.steps.drafting.speculator
    assert speculator is not None and 0 < speculator.accepted < speculator.drafted
    text = batch.engine.piece
    assert b"".join(map(text, answer)).decode() == batch.answers[1].text
    again = Sequence(b"", 1, (*row.prompt, *answer, 1, 2), row.options, 1, 5)
    batch.engine.admit(again)
    assert again.cached == len(row.prompt) + len(answer) - 1  # no pass has read the last token
    plain = Answers(engine(models, "slabs"))
    for runner in (batch, plain):
        runner.generations.release(again)
        follows = runner.admit(2, prompt=REPEATING, had=answer, temperature=0.0, max_tokens=50)
        assert follows.cached == (0 if runner is plain else len(row.prompt) + len(answer) - 1)
    assert batch.run()[2].ids == plain.run()[2].ids


def test_the_tokens_of_a_step_are_one_delta_of_a_stream() -> None:
    """A step gives at most one delta with tokens for each stream."""
    rows = [Sequence(bytes([name]), 1, (1,), None, 0, 9) for name in range(3)]  # type: ignore[arg-type]
    first, other, beside = (seq.id for seq in rows)
    deltas = [
        Delta(first, 1, 4, "a", b"1234", [{"id": 1}]),
        Delta(beside, 1, 0, "", b"", [{"prompt": 1}]),
        Delta(first, 1, 5, "b", b"5678", [{"id": 2}]),
        Delta(beside, 1, 0, "", b"", [{"prompt": 2}]),
        Delta(other, 1, 0, "x", b"abcd", None, {"prompt_tokens": 1}),
        Delta(other, 1, 1, "y", b"efgh"),
        Delta(other, 1, 2, "", b"", end={"reason": "stop"}),
    ]
    merged = one_each(deltas, {rows[0]: (1,), rows[1]: (2, 3)})
    assert merged == [
        Delta(first, 1, 4, "ab", b"12345678", [{"id": 1}, {"id": 2}]),
        deltas[1],
        deltas[3],
        Delta(other, 1, 0, "xy", b"abcdefgh", None, {"prompt_tokens": 1}, {"reason": "stop"}),
    ]
