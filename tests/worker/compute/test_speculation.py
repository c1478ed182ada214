"""Answers are the same with drafts as without: ids, text, log-probabilities, ends.

The drafts are right ones with wrong ones among them, in random depths; see support/drafting.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.constrained_answers import PROMPT, Answer, Answers, demo
from support.drafting import EagerSpeculator, OracleDrafter
from support.predicting_models import FAMILIES, write_predicting
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import Counting  # noqa: E402
from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.common.protocol.deltas import Delta  # noqa: E402
from mlxpool.worker.compute.drafting_rows import make_speculator, one_each  # noqa: E402
from mlxpool.worker.engine.counting_engine import CountingEngine  # noqa: E402
from mlxpool.worker.engine.engine import Engine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.context_policy import ContextShift  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.speculation.mtp import MtpDrafter  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402

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


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """Models with heads, whose tokens are those of the demo model."""
    root, size = tmp_path_factory.mktemp("predicting"), demo()[0].plan.vocab_size
    found = {}
    for family in FAMILIES:
        for kind in ("right", "wrong"):
            path, right = root / family / kind, kind == "right"
            write_predicting(path, family, 1, right=right, vocab_size=size)
            found[f"{family}, {kind}"] = load(inspect(path, predicts=True))
    return found


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
)
def test_answers_are_the_same_with_drafts(
    loaded: LoadedModel,
    requests: list[dict[str, Any]],
    layout: str,
    lookahead: bool,
    seed: int,
    disturbs: int,
) -> None:
    plain, draw = Answers(engine(loaded, layout)), random.Random(seed)
    wanted = answers_of(plain, requests)
    known = {bytes([number] * 16): answer.ids for number, answer in wanted.items()}
    known[bytes([9] * 16)] = [1] * 20
    speculator = EagerSpeculator(OracleDrafter(known, draw, plain.engine.vocab_size), draw)
    batch = Answers(engine(loaded, layout, lookahead=lookahead), speculator)
    require_same_answers(batch, wanted, requests, disturbs)
    assert batch.engine.blocks.available == plain.engine.blocks.available or layout != "pool"


def answers_of(batch: Answers, requests: list[dict[str, Any]]) -> dict[int, Answer]:
    """The answers to some requests, all of them in one batch."""
    for number, request in enumerate(requests):
        admit(batch, number, request)
    return batch.run()


def require_same_answers(
    batch: Answers, wanted: dict[int, Answer], requests: list[dict[str, Any]], disturbs: int
) -> None:
    """Resumed at any id, preempted in the middle, beside a row that is cancelled."""
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
    live = [row for row in rows if row in batch.generations.sequences()]
    if live and not batch.steps.in_flight:
        batch.generations.release(live[0])
        live[0].preempt()
    found = batch.run()
    for number in range(len(requests)):
        require_same(found[number], wanted[number], had[number])


def model_with_head(loaded: LoadedModel, layout: str, *, lookahead: bool = False) -> ModelEngine:
    return ModelEngine(
        loaded, demo()[1], layout=layout, lookahead=lookahead, blocks=32, prefix_bytes=2**20
    )


def of_head(engine: Engine, draw: random.Random | None = None) -> EagerSpeculator:
    """Has every row check drafts of the model's own head."""
    assert engine.predictor is not None
    return EagerSpeculator(MtpDrafter(engine.predictor), draw)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=3),
    model=st.sampled_from(["right", "wrong"]),
    place=st.sampled_from([*((family, "rows") for family in FAMILIES), ("glm4_moe_lite", "pool")]),
    lookahead=st.booleans(),
    seed=st.integers(0, 2**32),
    disturbs=st.integers(0, 12),
)
def test_answers_are_the_same_with_the_models_own_head(
    predicting: dict[str, LoadedModel],
    requests: list[dict[str, Any]],
    model: str,
    place: tuple[str, str],
    lookahead: bool,
    seed: int,
    disturbs: int,
) -> None:
    """Of each family, with heads whose drafts are mostly right and mostly wrong."""
    family, layout = place
    loaded = predicting[f"{family}, {model}"]
    wanted = answers_of(Answers(model_with_head(loaded, layout)), requests)
    made = model_with_head(loaded, layout, lookahead=lookahead)
    batch = Answers(made, of_head(made, random.Random(seed)))
    require_same_answers(batch, wanted, requests, disturbs)
    assert made.kv_use() == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_right_head_saves_steps(
    predicting: dict[str, LoadedModel], family: str, lookahead: bool
) -> None:
    """Rows of a batch together: one greedy, one sampled, one with penalties."""
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
    loaded = predicting[f"{family}, right"]
    wanted = answers_of(Answers(model_with_head(loaded, "rows")), requests)
    made = model_with_head(loaded, "rows", lookahead=lookahead)
    speculator = of_head(made)
    batch = Answers(made, speculator)
    for number, request in enumerate(requests):
        admit(batch, number, request)
    steps = 0
    while len(batch.generations):
        batch.step()
        steps += 1
    for number, answer in batch.run().items():
        require_same(answer, wanted[number])
    assert speculator.checks > 0 and speculator.accepted > 0.5 * speculator.drafted
    tokens = sum(len(answer.ids) for answer in wanted.values())
    assert tokens == 180 and speculator.accepted > 60 and steps < 60


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3_next"])
@pytest.mark.parametrize("setting", ["mtp", "auto"])
def test_the_setting_has_the_head_draft(
    predicting: dict[str, LoadedModel], family: str, setting: str
) -> None:
    """With "auto" beside n-grams. Its choices depend on the clock."""
    made = model_with_head(predicting[f"{family}, right"], "rows")
    speculator = make_speculator(setting, made, "some")
    assert speculator is not None
    assert speculator.drafter.name == ("mtp" if setting == "mtp" else "mtp or ngram")
    requests = [{**requested(number), "format": None} for number in range(3)]
    wanted = answers_of(Answers(model_with_head(predicting[f"{family}, right"], "rows")), requests)
    for number, answer in answers_of(Answers(made, speculator), requests).items():
        require_same(answer, wanted[number])


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


@pytest.mark.parametrize("setting", ["off", "ngram", "mtp", "auto"])
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
        if setting in ("ngram", "mtp"):
            with pytest.raises(ModelLoadFailed, match=f"speculation is '{setting}', but .*{words}"):
                make_speculator(setting, made, "some")
        else:
            assert make_speculator(setting, made, "some") is None
    if setting == "mtp":
        with pytest.raises(ModelLoadFailed, match=r"'mtp', but .*demo.* has no head"):
            make_speculator(setting, engine_of_demo(), "demo")
        return
    assert (make_speculator(setting, engine_of_demo(), "demo") is None) == (setting == "off")


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
