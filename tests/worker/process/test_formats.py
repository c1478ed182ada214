"""Tests requests with a format: the facts about them, which a resume must match.

Facts are values of a stream that stay the same on each worker, such as its format's digest.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.to_worker import Work
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.constraints.vocabulary import load_vocabulary
from mlxpool.worker.preparation.jobs import Encoded
from mlxpool.worker.process import formats
from mlxpool.worker.process.formats import Formats
from mlxpool.worker.process.intake import Intake
from mlxpool.worker.process.prompts import Arrival, prepare_run
from mlxpool.worker.prompt.text_model import Opened
from support.constrained_answers import constraint, demo, tokens_of
from support.pool import PATIENCE

COLOURS = {"type": "choice", "choices": ["red", "reddish", "blue"]}
OTHERS = {"type": "choice", "choices": ["red", "reddish", "green"]}


def admit(
    format: dict[str, Any] | None, had: list[int], *, thinks: bool = False, **facts: Any
) -> Admit:
    """Returns the Admit message of a request with a format, resumed after the ids `had`.

    `facts`: the facts about the stream that the resume names.
    """
    folder, text, table = demo()
    opened = Opened("digest", 64, folder.plan.vocab_size, table, text.source, folder.eos_ids)
    body = {
        "prompt": "a",
        "options": {"format": format},
        "resume": {"count": len(had), "facts": facts},
    }
    work = Work.parse(body, [pack_ids(had)])
    rule = None if format is None else constraint(format)
    prompt = Encoded(pack_ids(text.encode("a")), thinks=thinks)
    preparation = prepare_run(opened, (bytes(16), 1), work, Arrival(0.0, 0.0))
    message = preparation.finish(prompt) if rule is None else preparation.finish(prompt, rule)
    assert isinstance(message, Admit)
    return message


def ids_of(words: str) -> list[int]:
    _, text, _ = demo()
    return text.encode(words)[len(text.prefix) :]


def test_the_facts_name_the_grammar() -> None:
    first = admit(COLOURS, [])
    grammar = first.facts.body()["grammar"]
    assert grammar == constraint(COLOURS).digest != constraint(OTHERS).digest
    assert "grammar" not in admit(None, []).facts.body()
    again = admit(COLOURS, ids_of("red"), grammar=grammar)
    assert again.facts.body()["grammar"] == grammar
    assert again.constraint is not None and again.constraint.accepts


@pytest.mark.parametrize("format", [COLOURS, None])
def test_another_grammar_is_refused(format: dict[str, Any] | None) -> None:
    with pytest.raises(BadRequest, match="resume: the stream began with grammar"):
        admit(format, ids_of("red"), grammar=constraint(OTHERS).digest)


def test_ids_that_the_format_does_not_allow_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"resume: id .* may not follow in the format"):
        admit(COLOURS, ids_of("green"))


def test_the_format_holds_behind_thoughts() -> None:
    """The position at which the format begins follows from the ids alone.

    So it is right even if a resume begins inside the mark that ends the thoughts.
    """
    ids = ids_of("Is it red? No:</think>")
    for count in range(len(ids) + 1):
        rule = admit(COLOURS, ids[:count], thinks=True).constraint
        assert rule is not None
        for token in ids[count:]:
            assert demo()[0].eos_ids.isdisjoint(tokens_of(rule.mask()))
            assert not rule.accepts and not rule.finished
            rule.take(token)
        assert (rule.mask() == constraint(COLOURS).mask()).all()
        for token in ids_of("blue"):
            rule.take(token)
        assert rule.accepts and rule.finished


def test_a_vocabulary_that_is_being_loaded_is_loaded_before_the_worker_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading blocks the process, so it must end before the worker has any streams."""
    folder, text, table = demo()
    gate, loads, ready = threading.Event(), list[int](), threading.Event()

    def load(*arguments: Any) -> Any:
        loads.append(1)
        assert gate.wait(PATIENCE)
        return load_vocabulary(*arguments)

    monkeypatch.setattr(formats, "load_vocabulary", load)
    opened = Opened("digest", 64, folder.plan.vocab_size, table, text.source, folder.eos_ids)
    worker_formats = Formats(opened)
    assert worker_formats.is_settled(ready.set) and not loads
    worker_formats.load()
    assert not worker_formats.is_settled(ready.set) and not ready.is_set()
    gate.set()
    assert ready.wait(PATIENCE) and worker_formats.is_settled(ready.clear) and ready.is_set()
    worker_formats.load()
    assert worker_formats.is_settled(ready.clear) and loads == [1]


@pytest.mark.parametrize(("gpus", "platform"), [("", "linux"), ("0", "linux"), ("", "darwin")])
def test_without_a_gpu_the_vocabulary_waits_for_a_rest(
    gpus: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text, table = demo()
    opened = Opened("digest", 64, folder.plan.vocab_size, table, text.source, folder.eos_ids)
    steps = list[str]()
    monkeypatch.setattr(Formats, "load", lambda self: steps.append("load"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(sys, "platform", platform)

    class Started:
        def start(self) -> None:
            steps.append("start")

    none: Any = None
    make: Any = lambda *_: Started()  # noqa: E731
    intake = Intake(none, none, none, none, make)
    intake.opened(opened)
    assert steps == ["start", *(["load"] if gpus or platform == "darwin" else [])]
    steps.clear()
    intake.rest()
    assert steps == ["load"]


def test_a_vocabulary_that_cannot_be_loaded_ends_requests_with_a_format_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, text, table = demo()

    def load(*arguments: Any) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(formats, "load_vocabulary", load)
    opened = Opened("digest", 64, folder.plan.vocab_size, table, text.source, folder.eos_ids)
    worker_formats, ready, errors = Formats(opened), threading.Event(), queue.SimpleQueue[Any]()
    worker_formats.load()
    while not worker_formats.is_settled(ready.set):
        assert ready.wait(PATIENCE)
    worker_formats.constrain(COLOURS, lambda result, error: errors.put(error), Encoded(b""))
    assert "no such file" in str(errors.get(timeout=PATIENCE))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<|channel|>", "models that answer in channels"),
        ("{{ enable_thinking }}", "format with think"),
    ],
)
def test_thoughts_that_cannot_be_told_are_refused(template: str, words: str) -> None:
    folder, text, table = demo()
    source = replace(text.source, templates={"default": template})
    opened = Opened("digest", 64, folder.plan.vocab_size, table, source, folder.eos_ids)
    body = {"messages": [{"role": "user", "content": "a"}], "think": True}
    work = Work.parse({**body, "options": {"format": COLOURS}}, [])
    prompt = Encoded(pack_ids(text.encode("a")))
    with pytest.raises(BadRequest, match=words):
        prepare_run(opened, (bytes(16), 1), work, Arrival(0.0, 0.0)).finish(
            prompt, constraint(COLOURS)
        )
