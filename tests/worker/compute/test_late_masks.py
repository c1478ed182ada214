"""Tests rows with late masks: steps skip them, other rows continue, and answers are the same."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from support.constrained_answers import Answer, Answers, demo
from support.pool import PATIENCE, until
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import BadRequest  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.constraints import masks  # noqa: E402
from mlxpool.worker.constraints.constraint import Constraint, Words  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.sampling.row_masks import NO_MASKS  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.engine_steps import decode, decode_spans, enter  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

FORMAT = {"type": "regex", "pattern": "[a-z]{3,8}(-[0-9]{2}){2,3}; done(, [a-z]{4}){1,2}"}
SLOW: dict[str, Any] = {"format": FORMAT, "temperature": 0.9, "max_tokens": 60}
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"format": FORMAT, "temperature": 1.0},
    {"format": {"type": "json"}, "temperature": 0.0, "logprobs": True},
]
WAYS = [("slabs", False), ("pool", True)]


class Gate:
    """Blocks the making of mask number `number` of the constraint `held` until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.held: Constraint | None = None
        self.reached, self.opened = threading.Event(), threading.Event()
        self.fails = False  # whether the mask fails when the gate opens
        self._number = number
        self._made = 0
        self._true = Constraint.mask
        gate = self
        monkeypatch.setattr(Constraint, "mask", lambda constraint: gate.mask(constraint))

    def mask(self, constraint: Constraint) -> Words:
        if constraint is self.held:
            self._made += 1
            if self._made == self._number:
                self.reached.set()
                assert self.opened.wait(PATIENCE)
                if self.fails:
                    raise BadRequest("format: too complex")
        return self._true(constraint)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


@pytest.fixture
def withdrawn(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Makes every mask in another thread.

    Returns a list. It gets each sequence that leaves a pass and then reads its last input again.
    """
    sequences: list[Sequence] = []
    true = ModelEngine.withdraw

    def noted(engine: ModelEngine, seq: Sequence, *, again: bool) -> None:
        sequences.extend([seq] * again)
        true(engine, seq, again=again)

    monkeypatch.setattr(masks, "QUICK", -1.0)
    monkeypatch.setattr(ModelEngine, "withdraw", noted)
    return sequences


def batch_of(loaded: LoadedModel, layout: str, *, ahead: bool) -> Answers:
    text = demo()[1]
    return Answers(
        model_engine(
            loaded, text, context=512, prefix="off", lookahead=ahead, layout=layout, blocks=96
        )
    )


@pytest.fixture(scope="module")
def undelayed(loaded: LoadedModel) -> Callable[[str, bool], dict[int, Answer]]:
    """Returns a function that returns the answers to SLOW and OTHERS in a batch without late masks.

    SLOW has the number 9, and OTHERS are numbered from 0.
    """

    @functools.cache
    def found(layout: str, ahead: bool) -> dict[int, Answer]:
        whole = batch_of(loaded, layout, ahead=ahead)
        whole.admit(9, **SLOW)
        for at, options in enumerate(OTHERS):
            whole.admit(at, **options)
        return whole.run()

    return found


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize(("layout", "ahead"), WAYS)
def test_others_go_on_while_a_mask_is_made(
    loaded: LoadedModel,
    undelayed: Callable[[str, bool], dict[int, Answer]],
    layout: str,
    ahead: bool,
    number: int,
    withdrawn: list[Sequence],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = undelayed(layout, ahead)
    gate, batch = Gate(monkeypatch, number), batch_of(loaded, layout, ahead=ahead)
    slow = batch.admit(9, **SLOW)
    gate.held = batch.generations.of(slow).constraint
    for at, options in enumerate(OTHERS):
        batch.admit(at, **options)
    while not gate.reached.is_set():
        batch.step()
    withdrawn.clear()
    while len(batch.generations) > 1:
        batch.step()
    before = list(slow.ids)
    assert withdrawn.count(slow) <= 1, "no second step waits for the mask"
    for _ in range(3):  # `slow` waits alone
        batch.step()
    assert slow.held and slow.ids == before
    gate.opened.set()
    answers = batch.run()
    for at in (9, *range(len(OTHERS))):
        assert answers[at].ids == wanted[at].ids and answers[at].text == wanted[at].text
        assert answers[at].end["reason"] == wanted[at].end["reason"]


def test_a_row_whose_mask_is_late_can_be_cancelled(
    loaded: LoadedModel, withdrawn: list[Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, batch = Gate(monkeypatch, 3), batch_of(loaded, "slabs", ahead=False)
    slow = batch.admit(9, **SLOW)
    beside = batch.admit(1, **OTHERS[1])
    gate.held = batch.generations.of(slow).constraint
    while not slow.held:
        batch.step()
    delta = batch.generations.finish(batch.generations.of(slow), "cancelled")
    assert delta.end is not None and delta.end["reason"] == "cancelled"
    assert delta.end["complete"] is False
    batch.run()
    assert len(beside.ids) > 0
    gate.opened.set()


def test_a_late_mask_that_fails_ends_its_own_stream(
    loaded: LoadedModel, withdrawn: list[Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, batch = Gate(monkeypatch, 3), batch_of(loaded, "slabs", ahead=False)
    slow = batch.admit(9, **SLOW)
    gate.held = batch.generations.of(slow).constraint
    batch.admit(1, **OTHERS[1])
    while not slow.held:
        batch.step()
    gate.fails = True
    gate.opened.set()
    answers = batch.run()
    assert answers[9].end["message"] == "format: too complex"
    assert answers[1].end["reason"] in ("stop", "length")


def test_masks_that_are_quick_are_made_at_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some quick masks, further masks are made in the thread of the step.

    After a slow mask they are made in another thread again.
    """
    threads: list[str] = []
    true = Constraint.mask

    def noted(constraint: Constraint) -> Words:
        threads.append(threading.current_thread().name)
        return true(constraint)

    monkeypatch.setattr(Constraint, "mask", noted)
    monkeypatch.setattr(masks, "QUICK", 60.0)
    batch = batch_of(loaded, "slabs", ahead=False)
    row = batch.admit(1, **OTHERS[2], max_tokens=30)
    here = threading.current_thread().name
    while threads.count(here) < 3:
        batch.step()
    assert here not in threads[: masks.QUICK_MASKS]
    assert set(threads[masks.QUICK_MASKS :]) == {here}
    monkeypatch.setattr(masks, "QUICK", -1.0)

    def made_elsewhere() -> bool:
        batch.step()
        return threads[-1] != here

    until(made_elsewhere, "a mask is made in another thread again")
    assert 0 < len(row.ids) < 30
    batch.run()


def test_a_row_with_states_reads_its_last_input_again(tmp_path: Any) -> None:
    """A recurrent row that is taken out of a pass later reads its last input once more.

    This is possible because the states of the row can go back by one token.
    """
    folder = write_checkpoint(tmp_path, **{**QWEN3_NEXT, "num_hidden_layers": 2})
    model = load(inspect(folder))

    def rows() -> list[Sequence]:
        options = Options.parse({"ignore_eos": True})
        return [Sequence(bytes([n] * 16), 1, tuple(range(n, 60)), options, n, 20) for n in (1, 2)]

    wanted, actual = rows(), rows()
    for sequences in (wanted, actual):
        engine = model_engine(model, lookahead=False)
        for seq in sequences:
            enter(engine, seq)
        for number in range(6):
            if sequences is actual and number % 2:
                engine.forward(decode_spans(actual))
                engine.withdraw(actual[0], again=True)
                engine.draw(NO_MASKS)
                for sampled in engine.collect().drawn:
                    sampled.sequence.ids.append(sampled.token)
                decode(engine, actual[:1])
            else:
                decode(engine, sequences)
    assert [seq.ids for seq in actual] == [seq.ids for seq in wanted]
