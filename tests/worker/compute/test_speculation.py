"""Answers are the same with drafts as without: ids, text, log-probabilities, ends.

The drafts are right ones with wrong ones among them, in random depths; see support/drafting.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.constrained_answers import PROMPT, Answer, Answers, demo
from support.drafting import EagerSpeculator, OracleDrafter

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.compute.drafting_rows import one_each  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.context_policy import ContextShift  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
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
    made = ModelEngine(
        loaded, demo()[1], layout=layout, lookahead=lookahead, blocks=16, prefix_bytes=2**20
    )
    return made


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
    """Resumed at any id, preempted in the middle, beside a row that is cancelled."""
    plain = Answers(engine(loaded, layout))
    for number, request in enumerate(requests):
        admit(plain, number, request)
    wanted = plain.run()
    draw = random.Random(seed)
    known = {bytes([number] * 16): answer.ids for number, answer in wanted.items()}
    known[bytes([9] * 16)] = [1] * 20
    speculator = EagerSpeculator(OracleDrafter(known, draw, plain.engine.vocab_size), draw)
    batch = Answers(engine(loaded, layout, lookahead=lookahead), speculator)
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
    assert speculator.accepted <= speculator.drafted
    assert batch.engine.blocks.available == plain.engine.blocks.available or layout != "pool"
