"""Tests `decide` calls in the compute thread, in every layout, beside streams.

The results are compared with full passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import pytest

from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.options import Options
from mlxpool.common.protocol.decisions import DecideCall, Question
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.worker.compute.messages import (
    Answer,
    CallKey,
    Decide,
    DropAll,
    DropCall,
    EncodedQuestion,
    HandBack,
    HandedBack,
    StepDeltas,
)
from mlxpool.worker.compute.model_source import ModelSource
from mlxpool.worker.decisions.answers import Path
from mlxpool.worker.decisions.prompts import AskQuestions
from mlxpool.worker.preparation.jobs import perform
from mlxpool.worker.process.calls import prepare_decide
from mlxpool.worker.process.prompts import Arrival
from mlxpool.worker.prompt.text_model import Opened
from support.compute_harness import ComputeHarness, ids_of
from support.engine_steps import step
from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.engine.engine import Engine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import engine_of_kind, model_engine  # noqa: E402
from support.pool import PATIENCE  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "latent": GLM,
    "states": {**QWEN3_NEXT, "num_hidden_layers": 2},
}
LAYOUTS = {"full attention": ("rows", "slabs", "pool"), "latent": ("rows", "pool")}
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS.get(name, ("rows",))]
TEXT = "the fox and the dog. " * 6
QUESTIONS = [
    Question("is it?"),
    Question("which?", ("a fox", "a dog", "none")),
    Question("how many?", scale=(1, 12)),
    Question(choices=("left", "right")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: load(
            inspect(
                write_checkpoint(
                    folder / name.replace(" ", "_"), max_position_embeddings=2048, **changes
                )
            )
        )
        for name, changes in MODELS.items()
    }


def opened_of(loaded: LoadedModel) -> tuple[Opened, ChatTokenizer]:
    folder = loaded.folder
    text = ChatTokenizer.from_folder(folder)
    return Opened("", folder.context, folder.plan.vocab_size, text, text.source), text


def started(
    loaded: LoadedModel, kind: type[ModelEngine] = ModelEngine, sequences: int = 4, **settings: Any
) -> ComputeHarness:
    """A compute thread with this model, without the slow warm-up."""
    opened, text = opened_of(loaded)

    def build(on_progress: object) -> Engine:
        engine = engine_of_kind(
            kind, loaded, text, **{"blocks": 60, "max_sequences": sequences, **settings}
        )
        engine.warm_up = lambda on_progress=None: None  # type: ignore[method-assign]
        return engine

    def open_source(config: ModelConfig) -> ModelSource:
        return ModelSource(opened, build, config.sequences)

    return ComputeHarness(sequences, source=open_source).ready()


def key_of(number: int) -> CallKey:
    return CallKey(bytes([200 + number] * 16), number)


def prepared(
    loaded: LoadedModel, number: int, questions: Many[Question] = QUESTIONS, **changes: Any
) -> Decide:
    opened, text = opened_of(loaded)
    call = DecideCall(changes.pop("prompt", TEXT), tuple(questions), **changes)
    preparation = prepare_decide(opened, key_of(number), call, Arrival(0.0, 0.0))
    assert isinstance(preparation.job, AskQuestions)
    message = preparation.finish(perform(text, preparation.job))
    assert isinstance(message, Decide)
    return message


def answer_of(harness: ComputeHarness) -> Answer:
    """The next answer; deltas of streams are dropped."""
    while isinstance(mail := harness.mail.get(timeout=PATIENCE), StepDeltas):
        harness.compute.delta_queue.acknowledge()
    assert isinstance(mail, Answer), mail
    return mail


def log_probabilities(loaded: LoadedModel, prompt: tuple[int, ...]) -> Mapping[int, float]:
    """The log-probabilities of all tokens after a prompt, by a full pass without any cache."""
    engine = model_engine(loaded, layout="rows", prefix="off", lookahead=False)
    size = loaded.folder.plan.vocab_size
    seq = Sequence(b"", 1, prompt, Options(logprobs=True, top_logprobs=size), 1, 1)
    engine.admit(seq)
    if engine.clip(seq, len(prompt)) < len(prompt):
        step(engine, [Span(seq, 0, len(prompt) - 1, 0)])
    (drawn,) = step(engine, [Span(seq, seq.submitted, len(prompt) - seq.submitted, 1)])
    assert drawn.logprob is not None and len(drawn.logprob.top) == size
    return dict(drawn.logprob.top)


def expected(loaded: LoadedModel, question: EncodedQuestion) -> dict[str, Any]:
    """The expected row of one question; each branch is computed by its own full pass."""
    logprobs: dict[Path, Mapping[int, float]] = {
        branch: log_probabilities(loaded, (*question.prompt, *branch))
        for branch in question.answers.branches()
    }
    masses = []
    for paths in question.answers.paths:
        mass = 0.0
        for path in paths:
            probability = math.prod(
                math.exp(logprobs[path[:at]][token]) for at, token in enumerate(path)
            )
            longer = question.answers.branches().get(path, ())
            mass += probability * (1 - sum(math.exp(logprobs[path][token]) for token in longer))
        masses.append(mass)
    inside = sum(masses)
    return {"probabilities": [mass / inside for mass in masses], "outside": 1 - inside}


def check(answer: CallAnswer, wanted: Many[dict[str, Any]]) -> None:
    assert not answer.failed, answer.fields
    assert len(answer.fields["decisions"]) == len(wanted)
    for row, want in zip(answer.fields["decisions"], wanted, strict=True):
        assert row["probabilities"] == pytest.approx(want["probabilities"], abs=1e-4)
        assert row["outside"] == pytest.approx(want["outside"], abs=1e-4)


@pytest.mark.parametrize("prefix", ["tree", "single", "off"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_probabilities_are_those_of_full_passes(
    models: dict[str, LoadedModel], name: str, layout: str, prefix: str
) -> None:
    loaded = models[name]
    message = prepared(loaded, 1)
    wanted = [expected(loaded, question) for question in message.questions]
    harness = started(loaded, layout=layout, prefix=prefix)
    for number in (1, 2):  # the second time the text is cached
        harness.compute.send(prepared(loaded, number))
        answer = answer_of(harness)
        assert (answer.key, answer.content.kind) == (key_of(number), "decisions")
        check(answer.content, wanted)
    tokens = message.shared + sum(
        len(question.prompt) - message.shared for question in message.questions
    )
    assert answer.content.fields["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


class CountsInputs(ModelEngine):
    """An engine that records the number of inputs and of sequences of each pass."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.inputs: list[int] = []
        self.spans: list[int] = []
        ENGINES.append(self)

    def submit(self, spans: Many[Span]) -> bool:
        self.inputs.append(sum(span.count for span in spans))
        self.spans.append(len(spans))
        return super().submit(spans)


ENGINES: list[CountsInputs] = []


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_read_once(models: dict[str, LoadedModel], name: str) -> None:
    questions = [Question(f"{n}?", ("yes", "no")) for n in range(16)]
    message = prepared(models[name], 1, questions)
    harness = started(models[name], CountsInputs)
    harness.compute.send(message)
    assert not answer_of(harness).content.failed
    own = sum(len(question.prompt) - message.shared for question in message.questions)
    engine = ENGINES.pop()
    assert sum(engine.inputs) == message.shared + own
    assert max(engine.spans) == 4  # the engine's limit of sequences
    # A row that can be rewound is used again, because it already has the text.
    begun = engine.prefix.hits + engine.prefix.misses
    assert begun == (len(questions) if name == "states" else 1 + 4)
    # The cache keeps only the text, not the questions.
    assert engine.prefix.nbytes <= engine.inspect().budget.block * (len(TEXT) // 256 + 2)
    harness.compute.send(prepared(models[name], 2, questions))
    assert not answer_of(harness).content.failed
    assert sum(engine.inputs) == message.shared + 2 * own


def test_streams_go_on_meanwhile_with_the_same_tokens(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    alone = started(loaded)
    alone.admit(1, "a stream", 60, ignore_eos=True, temperature=0)
    wanted = ids_of(alone.until_ended({1})[1])
    harness = started(loaded, CountsInputs)
    engine = ENGINES.pop()
    harness.admit(1, "a stream", 60, ignore_eos=True, temperature=0)
    harness.compute.send(prepared(loaded, 1, [Question(f"{n}?") for n in range(64)]))
    harness.admit(2, "later", 20, ignore_eos=True, temperature=0)
    deltas: list[Delta] = []
    answers: list[tuple[Answer, set[int]]] = []
    ended: set[int] = set()
    while len(ended) < 2 or not answers:
        mail = harness.mail.get(timeout=PATIENCE)
        if isinstance(mail, Answer):
            answers.append((mail, set(ended)))
            continue
        assert isinstance(mail, StepDeltas)
        harness.compute.delta_queue.acknowledge()
        deltas += [delta for delta in mail.deltas if delta.id[0] == 1]
        ended |= {delta.id[0] for delta in mail.deltas if delta.end is not None}
        assert all(delta.id[0] in (1, 2) for delta in mail.deltas)
    assert ids_of(deltas) == wanted
    ((answer, ended_before),) = answers
    assert not answer.content.failed
    assert ended_before == {1, 2}  # the streams did not wait for the questions' many more passes
    assert max(engine.spans) <= 4


def test_calls_of_several_owners_have_turns(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    harness = started(loaded, sequences=2)
    many = [Question(f"{n}?", ("a", "b")) for n in range(64)]
    for number in (1, 2):
        harness.compute.send(prepared(loaded, number, many, owner="many"))
    harness.compute.send(prepared(loaded, 3, many[:2], owner="few"))
    assert [answer_of(harness).key.number for _ in range(3)] == [3, 1, 2]


def test_a_call_of_another_owner_gets_a_row_of_one_that_has_all(
    models: dict[str, LoadedModel],
) -> None:
    """Another owner's streams have all rows, so a `decide` call preempts one of them.

    This stream continues later, with the same tokens.
    """
    loaded = models["full attention"]
    alone = started(loaded, sequences=2)
    for name in (1, 2):
        alone.admit(name, "a stream", 200, ignore_eos=True, temperature=0)
    wanted = alone.until_ended({1, 2})
    harness = started(loaded, sequences=2)
    for name in (1, 2):
        harness.admit(name, "a stream", 200, ignore_eos=True, temperature=0, owner="many")
    message = prepared(loaded, 1, owner="few")
    harness.compute.send(message)
    deltas: dict[int, list[Delta]] = {1: [], 2: []}
    while not isinstance(mail := harness.mail.get(timeout=PATIENCE), Answer):
        assert isinstance(mail, StepDeltas)
        harness.compute.delta_queue.acknowledge()
        for delta in mail.deltas:
            deltas[delta.id[0]].append(delta)
            assert delta.end is None, "it did not wait for the end of a stream"
    check(mail.content, [expected(loaded, question) for question in message.questions])
    assert harness.progress.preemptions == 1
    rest = harness.until_ended({1, 2})
    for name in (1, 2):
        assert ids_of([*deltas[name], *rest[name]]) == ids_of(wanted[name])


def test_a_cancelled_call_leaves_and_is_not_answered(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    harness = started(loaded)
    harness.compute.send(prepared(loaded, 1, [Question(f"{n}?") for n in range(64)]))
    harness.compute.send(prepared(loaded, 2))
    harness.compute.send(DropCall(key_of(1)))
    harness.compute.send(DropCall(key_of(9)))
    assert answer_of(harness).key == key_of(2)
    harness.compute.send(prepared(loaded, 3))
    harness.compute.send(DropAll(5))
    harness.compute.send(prepared(loaded, 4))
    assert answer_of(harness).key == key_of(4)


def test_a_drained_worker_answers_its_calls(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    harness = started(loaded)
    message = prepared(loaded, 1)
    harness.admit(1, "a stream", 200, ignore_eos=True)
    harness.compute.send(message)
    harness.compute.send(HandBack())
    while not isinstance(mail := harness.mail.get(timeout=PATIENCE), HandedBack):
        assert isinstance(mail, StepDeltas)
    check(
        answer_of(harness).content, [expected(loaded, question) for question in message.questions]
    )


class FailsWith(ModelEngine):
    """An engine that raises RuntimeError in each pass over `count` sequences."""

    count = 2

    def submit(self, spans: Many[Span]) -> bool:
        if len(spans) == self.count:
            raise RuntimeError("this pass fails")
        return super().submit(spans)


class FailsAlone(FailsWith):
    count = 1


def test_a_pass_that_fails_with_several_questions_is_done_again(
    models: dict[str, LoadedModel],
) -> None:
    loaded = models["full attention"]
    message = prepared(loaded, 1)
    harness = started(loaded, FailsWith, sequences=2)
    harness.compute.send(message)
    check(
        answer_of(harness).content, [expected(loaded, question) for question in message.questions]
    )


def test_a_question_that_fails_alone_is_named(models: dict[str, LoadedModel]) -> None:
    harness = started(models["full attention"], FailsAlone)
    harness.compute.send(prepared(models["full attention"], 1, first=64))
    fields = answer_of(harness).content.fields
    assert fields["code"] == "internal"
    assert fields["message"].startswith("questions[64]: the step failed: RuntimeError")


def test_a_text_that_memory_cannot_hold_is_refused(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    harness = started(loaded, blocks=3)
    harness.compute.send(prepared(loaded, 1, prompt="x" * 1500))
    fields = answer_of(harness).content.fields
    assert fields["code"] == "out_of_memory" and "questions[0]: " in fields["message"]
    harness.compute.send(prepared(loaded, 2))
    assert not answer_of(harness).content.failed


def test_few_blocks_delay_questions_and_lose_none(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    message = prepared(loaded, 1, prompt="x " * 200)
    wanted = [expected(loaded, question) for question in message.questions]
    for layout in LAYOUTS["full attention"]:
        harness = started(loaded, blocks=7, layout=layout)
        harness.admit(1, "a stream", 300, ignore_eos=True)
        harness.compute.send(message)
        check(answer_of(harness).content, wanted)
        harness.drop(1)
        harness.until_ended({1})


def test_a_call_that_may_have_ended_a_worker_is_read_line_by_line(
    models: dict[str, LoadedModel],
) -> None:
    loaded = models["full attention"]
    harness = started(loaded, CountsInputs)
    message = prepared(loaded, 1, alone=True)
    harness.compute.send(message)
    check(
        answer_of(harness).content, [expected(loaded, question) for question in message.questions]
    )
    assert set(ENGINES.pop().spans) == {1}


def test_a_temperature_changes_the_labels_alone(models: dict[str, LoadedModel]) -> None:
    loaded = models["full attention"]
    harness = started(loaded)
    rows: list[dict[str, Any]] = []
    for number, temperature in enumerate((1.0, 4.0)):
        harness.compute.send(prepared(loaded, number, temperature=temperature))
        rows += answer_of(harness).content.fields["decisions"][1:2]
    plain, flat = rows
    powers = [probability**0.25 for probability in plain["probabilities"]]
    assert flat["probabilities"] == pytest.approx(
        [power / sum(powers) for power in powers], rel=1e-4
    )
    assert flat["outside"] == pytest.approx(plain["outside"], abs=1e-6)


def test_scored_tokens_beside_log_probabilities_of_a_stream(
    models: dict[str, LoadedModel],
) -> None:
    """One pass draws tokens for streams and scores the answers of `decide` questions."""
    loaded = models["full attention"]
    engine = model_engine(loaded, prefix="off", lookahead=False)
    prompt = tuple(range(40, 60))
    wanted = log_probabilities(loaded, prompt)
    top = Options(temperature=0, logprobs=True, top_logprobs=3)
    rows = [
        Sequence(b"a", 1, prompt, top, 1, 4),
        Sequence(b"b", -1, prompt, Options(temperature=0), 1, 1, scored=(9, 200, 3)),
        Sequence(b"c", -2, prompt, Options(temperature=0), 1, 1, scored=(5,)),
        Sequence(b"d", 1, prompt, Options(temperature=0), 1, 4),
    ]
    for seq in rows:
        engine.admit(seq)
    drawn = {
        sampled.sequence: sampled for sampled in step(engine, [Span(seq, 0, 20, 1) for seq in rows])
    }
    logprobs = [drawn[seq].logprob for seq in rows]
    assert logprobs[3] is None
    best = sorted(wanted.items(), key=lambda entry: -entry[1])[:3]
    for logprob, want in (
        (logprobs[0], best),
        (logprobs[1], [(token, wanted[token]) for token in (9, 200, 3)]),
        (logprobs[2], [(5, wanted[5])]),
    ):
        assert logprob is not None
        assert [token for token, _ in logprob.top] == [token for token, _ in want]
        assert [value for _, value in logprob.top] == pytest.approx(
            [value for _, value in want], abs=1e-4
        )
