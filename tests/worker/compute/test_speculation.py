"""Answers are the same with drafts as without: ids, text, log-probabilities, ends.

The drafts are right ones with wrong ones among them, in random depths; see support/drafting.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.constrained_answers import PROMPT, Answer, Answers, demo
from support.drafting import EagerSpeculator, OracleDrafter
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import Counting  # noqa: E402
from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.common.protocol.deltas import Delta  # noqa: E402
from mlxpool.worker.compute.drafting_rows import (  # noqa: E402
    MAX_FAILURES,
    make_speculator,
    one_each,
)
from mlxpool.worker.draft_model.engine import DraftModelEngine  # noqa: E402
from mlxpool.worker.engine.counting_engine import CountingEngine  # noqa: E402
from mlxpool.worker.engine.engine import Engine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.context_policy import ContextShift  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.speculation.drafter import Drafter  # noqa: E402
from mlxpool.worker.speculation.model_drafter import ModelDrafter  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from mlxpool.worker.weights.locate import DEMO_DRAFT, FOLDERS  # noqa: E402

REPEATING = "a = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2"
CONTEXT = 40  # tokens of a request that shifts
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


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


def admit(batch: Answers, number: int, request: dict[str, Any], had: Any = ()) -> Sequence:
    options = dict(request["options"])
    if request["format"] is not None:
        options["format"] = request["format"]
        options.pop("ignore_eos", None)  # refused beside a format
    if request["shifts"]:
        options |= {"shift": True, "num_ctx": CONTEXT, "num_keep": 2}
    row = batch.admit(
        number, prompt=request["prompt"], max_tokens=request["max_tokens"], had=had, **options
    )
    if request["shifts"]:
        row.shift = ContextShift(CONTEXT, 2)
        row.discarded = row.shift.discarded(len(row.prompt) + len(row.ids))
    return row


def engine(loaded: LoadedModel, layout: str, *, lookahead: bool = False) -> ModelEngine:
    return ModelEngine(
        loaded, demo()[1], layout=layout, lookahead=lookahead, blocks=32, prefix_bytes=2**20
    )


@pytest.fixture(scope="module")
def draft() -> LoadedModel:
    return load(inspect(FOLDERS[DEMO_DRAFT]))


def with_draft(
    loaded: LoadedModel, draft: LoadedModel, layout: str, *, lookahead: bool = False
) -> ModelEngine:
    """The demo model with its draft model, which has fewer rows than there are requests."""
    return ModelEngine(
        loaded,
        demo()[1],
        layout=layout,
        lookahead=lookahead,
        blocks=32,
        prefix_bytes=2**20,
        draft=DraftModelEngine(draft, demo()[2], rows=5, limit=0),
    )


def drafter_of(engine: ModelEngine) -> ModelDrafter:
    assert engine.draft is not None
    return ModelDrafter(engine.draft, engine.vocab_size, monotonic)


def engine_of_demo() -> ModelEngine:
    return engine(load(demo()[0]), "slabs")


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
    for one, other in zip(found.logprobs[::-1], wanted.logprobs[::-1], strict=False):
        assert one["id"] == other["id"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
    assert len(found.logprobs) == max(0, len(wanted.logprobs) - had)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=4),
    layout=st.sampled_from(["rows", "slabs", "pool"]),
    lookahead=st.booleans(),
    seed=st.integers(0, 2**32),
    disturbs=st.integers(0, 12),
    asks=st.booleans(),
)
def test_answers_are_the_same_with_drafts(
    loaded: LoadedModel,
    draft: LoadedModel,
    requests: list[dict[str, Any]],
    layout: str,
    lookahead: bool,
    seed: int,
    disturbs: int,
    asks: bool,
) -> None:
    """Resumed at any id, preempted in the middle, beside a row that is cancelled.

    `asks`: the drafts come from the draft model, which loses its rows in the middle.
    """
    plain = Answers(engine(loaded, layout))
    for number, request in enumerate(requests):
        admit(plain, number, request)
    wanted = plain.run()
    draw = random.Random(seed)
    known = {bytes([number] * 16): answer.ids for number, answer in wanted.items()}
    known[bytes([9] * 16)] = [1] * 20
    drafter: Drafter = OracleDrafter(known, draw, plain.engine.vocab_size)
    made = engine(loaded, layout, lookahead=lookahead)
    if asks:
        made = with_draft(loaded, draft, layout, lookahead=lookahead)
        drafter = drafter_of(made)
    speculator = EagerSpeculator(drafter, draw)
    batch = Answers(made, speculator)
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
    if made.draft is not None:
        made.draft.make_room(1)
    live = [row for row in rows if row in batch.generations.sequences()]
    if live and not batch.steps.in_flight:
        batch.generations.release(live[0])
        live[0].preempt()
    found = batch.run()
    for number in range(len(requests)):
        require_same(found[number], wanted[number], had[number])
    assert speculator.accepted <= speculator.drafted
    assert batch.engine.blocks.available == plain.engine.blocks.available or layout != "pool"


REQUESTED: list[dict[str, Any]] = [
    {"prompt": REPEATING, "options": {"temperature": 0.0, "logprobs": True}, "format": None},
    {"prompt": PROMPT, "options": {"temperature": 0.9, "seed": 5}, "format": FORMATS[0]},
    {"prompt": PROMPT, "options": {"temperature": 0.8, "repeat_penalty": 1.2}, "format": None},
    {"prompt": REPEATING, "options": {"temperature": 0.0}, "format": FORMATS[2]},
]


def requested(number: int) -> dict[str, Any]:
    return {**REQUESTED[number], "max_tokens": 60, "shifts": False}


def run(
    loaded: LoadedModel, layout: str, speculator: Any, *, lookahead: bool = False
) -> tuple[dict[int, Answer], int]:
    """The answers to all of REQUESTED, and the steps that they took."""
    batch = Answers(engine(loaded, layout, lookahead=lookahead), speculator)
    for number in range(len(REQUESTED)):
        admit(batch, number, requested(number))
    steps = 0
    while len(batch.generations):
        batch.step()
        steps += 1
    return batch.run(), steps


@pytest.mark.parametrize(("layout", "lookahead"), [("slabs", False), ("pool", True)])
def test_right_drafts_save_steps(loaded: LoadedModel, layout: str, lookahead: bool) -> None:
    """Of rows with and without a format; a step with drafts is the only one in flight."""
    wanted, plain_steps = run(loaded, layout, None, lookahead=lookahead)
    known = {bytes([number] * 16): answer.ids for number, answer in wanted.items()}
    speculator = EagerSpeculator(OracleDrafter(known, random.Random(7), 4096))
    found, steps = run(loaded, layout, speculator, lookahead=lookahead)
    for number, answer in wanted.items():
        require_same(found[number], answer)
    assert speculator.accepted > 60 and speculator.accepted > speculator.drafted / 4
    assert steps < 0.7 * plain_steps


@pytest.mark.parametrize("lookahead", [False, True])
def test_n_grams_give_the_same_answers(loaded: LoadedModel, lookahead: bool) -> None:
    wanted, _ = run(loaded, "slabs", None)
    speculator = EagerSpeculator()
    found, _ = run(loaded, "slabs", speculator, lookahead=lookahead)
    for number, answer in wanted.items():
        require_same(found[number], answer)
    assert speculator.accepted > 20


def test_the_speculator_of_the_setting_gives_the_same_answers(loaded: LoadedModel) -> None:
    """Its choices depend on the clock, so nothing is said of how many drafts it checks."""
    wanted, _ = run(loaded, "slabs", None)
    made = engine(loaded, "slabs")
    found, _ = run(loaded, "slabs", make_speculator("ngram", made, "demo"))
    for number, answer in wanted.items():
        require_same(found[number], answer)


@pytest.mark.parametrize(("layout", "lookahead"), [("slabs", False), ("pool", True)])
def test_the_draft_model_of_the_demo_gives_the_same_answers(
    loaded: LoadedModel, draft: LoadedModel, layout: str, lookahead: bool
) -> None:
    """Many of its drafts are right."""
    wanted, _ = run(loaded, layout, None)
    made = with_draft(loaded, draft, layout, lookahead=lookahead)
    speculator = EagerSpeculator(drafter_of(made))
    batch = Answers(made, speculator)
    for number in range(len(REQUESTED)):
        admit(batch, number, requested(number))
    found = batch.run()
    for number, answer in wanted.items():
        require_same(found[number], answer)
    assert speculator.accepted > 20 and speculator.accepted > speculator.drafted / 10
    memory = made.memory()
    assert memory.draft >= draft.weight_bytes
    made.close()


def test_the_speculator_of_a_draft_model_gives_the_same_answers(
    loaded: LoadedModel, draft: LoadedModel
) -> None:
    """Its choices depend on the clock, so nothing is said of how many drafts it checks."""
    wanted, _ = run(loaded, "slabs", None)
    made = with_draft(loaded, draft, "slabs")
    made.warm_up()
    for setting in ("draft", "auto"):
        speculator = make_speculator(setting, made, "demo")
        assert speculator is not None and speculator.drafter.name == setting
        batch = Answers(made, speculator)
        for number in range(len(REQUESTED)):
            admit(batch, number, requested(number))
        found = batch.run()
        for number, answer in wanted.items():
            require_same(found[number], answer)
    assert make_speculator("off", made, "demo") is None


def test_a_draft_model_that_fails_disturbs_no_answer(
    loaded: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few failures in a row it is not asked any more."""
    wanted, _ = run(loaded, "slabs", None)
    made = with_draft(loaded, draft, "slabs")
    asked = []

    def fails(*_: Any) -> None:
        asked.append(1)
        raise RuntimeError("the draft model fails")

    assert made.draft is not None
    monkeypatch.setattr(made.draft, "submit", fails)
    batch = Answers(made, EagerSpeculator(drafter_of(made)))
    for number in range(len(REQUESTED)):
        admit(batch, number, requested(number))
    found = batch.run()
    for number, answer in wanted.items():
        require_same(found[number], answer)
    assert len(asked) == MAX_FAILURES


def test_room_is_left_for_the_draft_model(loaded: LoadedModel, draft: LoadedModel) -> None:
    """Its weights and all of its rows are within the limit; what it has is shown."""
    limit = 2**30
    drafts = DraftModelEngine(draft, demo()[2], rows=4, limit=limit)
    plain = ModelEngine(loaded, demo()[1], limit=limit, prefix_bytes=2**20)
    beside = ModelEngine(loaded, demo()[1], limit=limit, prefix_bytes=2**20, draft=drafts)
    assert drafts.held_bytes > draft.weight_bytes + 4 * drafts.context * drafts._block_bytes // 256
    less = plain._free_blocks() - beside._free_blocks()
    blocks = drafts.held_bytes / beside._block_bytes
    assert blocks - 2 <= less <= blocks + 2 + 2**26 / beside._block_bytes
    assert plain.memory().draft == 0 < draft.weight_bytes <= beside.memory().draft


@pytest.mark.parametrize("setting", ["off", "ngram", "auto"])
def test_what_checks_no_drafts_is_refused_by_name(setting: str, tmp_path: Path) -> None:
    """With "auto" it serves without."""
    exact = load(demo()[0], deterministic=True)
    states = {**QWEN3_NEXT, "num_hidden_layers": 2}
    recurrent = load(inspect(write_checkpoint(tmp_path, **states)))
    engines: list[tuple[Engine, str]] = [
        (CountingEngine(Counting(), 1000), "the counting model cannot check drafts"),
        (ModelEngine(exact, demo()[1], blocks=4), "deterministic is true"),
        (ModelEngine(recurrent, blocks=4), "states or windows"),
    ]
    for made, words in engines:
        if setting == "ngram":
            with pytest.raises(ModelLoadFailed, match=f"speculation is 'ngram', but .*{words}"):
                make_speculator(setting, made, "some")
        else:
            assert make_speculator(setting, made, "some") is None
    assert (make_speculator(setting, engine_of_demo(), "demo") is None) == (setting == "off")


def test_a_draft_model_of_what_checks_no_drafts_is_refused(
    draft: LoadedModel, tmp_path: Path
) -> None:
    """With "auto" as well: it would be loaded for nothing."""
    recurrent = load(inspect(write_checkpoint(tmp_path, **{**QWEN3_NEXT, "num_hidden_layers": 2})))
    drafts = DraftModelEngine(draft, demo()[2], rows=1, limit=0)
    made = ModelEngine(recurrent, blocks=4, draft=drafts)
    for setting in ("draft", "auto"):
        with pytest.raises(ModelLoadFailed, match="leave speculation and draft out"):
            make_speculator(setting, made, "some")


def test_wrong_drafts_are_in_no_cached_prefix(loaded: LoadedModel) -> None:
    """A later prompt with the answer in it finds its keys, and none of what was proposed."""
    batch = Answers(engine(loaded, "slabs"), EagerSpeculator())
    row = batch.admit(1, prompt=REPEATING, temperature=0.0, max_tokens=30, ignore_eos=True)
    answer = batch.run()[1].ids
    speculator = batch.steps._drafting._speculator
    assert speculator is not None and 0 < speculator.accepted < speculator.drafted
    text = batch.engine.piece
    assert b"".join(map(text, answer)).decode() == batch.answers[1].text
    again = Sequence(b"", 1, (*row.prompt, *answer, 1, 2), row.options, 1, 5)
    batch.engine.admit(again)
    assert again.cached == len(row.prompt) + len(answer) - 1  # no pass has read the last token
    plain = Answers(engine(loaded, "slabs"))
    for one in (batch, plain):
        one.generations.release(again)
        follows = one.admit(2, prompt=REPEATING, had=answer, temperature=0.0, max_tokens=50)
        assert follows.cached == (0 if one is plain else len(row.prompt) + len(answer) - 1)
    assert batch.run()[2].ids == plain.run()[2].ids


def test_the_tokens_of_a_step_are_one_delta_of_a_stream() -> None:
    """At most one delta with tokens of each stream leaves the compute thread at once."""
    rows = [Sequence(bytes([name]), 1, (1,), None, 0, 9) for name in range(3)]  # type: ignore[arg-type]
    one, other, beside = (seq.id for seq in rows)
    deltas = [
        Delta(one, 1, 4, "a", b"1234", [{"id": 1}]),
        Delta(beside, 1, 0, "", b"", [{"prompt": 1}]),
        Delta(one, 1, 5, "b", b"5678", [{"id": 2}]),
        Delta(beside, 1, 0, "", b"", [{"prompt": 2}]),
        Delta(other, 1, 0, "x", b"abcd", None, {"prompt_tokens": 1}),
        Delta(other, 1, 1, "y", b"efgh"),
        Delta(other, 1, 2, "", b"", end={"reason": "stop"}),
    ]
    found = one_each(deltas, {rows[0]: (1,), rows[1]: (2, 3)})
    assert found == [
        Delta(one, 1, 4, "ab", b"12345678", [{"id": 1}, {"id": 2}]),
        deltas[1],
        deltas[3],
        Delta(other, 1, 0, "xy", b"abcdefgh", None, {"prompt_tokens": 1}, {"reason": "stop"}),
    ]
