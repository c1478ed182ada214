"""Tests the models allowed as draft models: the same tokenizer, and rows that can be trimmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.options import Options
from mlxpool.worker.compute.model_source import draft_of, open_source
from mlxpool.worker.draft_model.opening import inspect_draft, load_draft
from mlxpool.worker.engine.opening import NO_TOKEN
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import DEMO_FOLDER
from support.draft_models import write_draft

Change = Callable[[dict[str, Any]], None]


def copied(folder: Path, file: str, change: Change) -> str:
    """Makes a draft model of the demo model with one of its files changed; returns its path."""
    write_draft(folder)
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))
    return str(folder)


def exchange(data: dict[str, Any]) -> None:
    """Exchanges the ids 70 and 90 of a tokenizer."""
    vocabulary = data["model"]["vocab"]
    first, other = ({id: text for text, id in vocabulary.items()}[id] for id in (70, 90))
    vocabulary[first], vocabulary[other] = 90, 70


def make_special(data: dict[str, Any]) -> None:
    (text,) = (text for text, token in data["model"]["vocab"].items() if token == 4000)
    data["added_tokens"].append({**data["added_tokens"][0], "id": 4000, "content": text})


def make_ordinary(data: dict[str, Any]) -> None:
    data["added_tokens"][0]["special"] = False


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a draft model of the demo model."""
    return str(write_draft(tmp_path_factory.mktemp("models") / "draft"))


def test_a_model_with_the_tokenizer_of_the_demo_may_draft_for_it(draft: str) -> None:
    folder = inspect_draft(draft, inspect(DEMO_FOLDER))
    engine = load_draft(folder, lambda tensors, size: None, rows=1, limit=0)
    engine.warm_up()
    assert engine.max_rows == 1 and engine.context == folder.context <= 1024


def test_a_draft_model_tells_what_it_compiles_and_each_pass(draft: str) -> None:
    """A draft model reports that it compiles, and reports progress after each of its passes.

    Before its first draft it may read a long text in several passes.
    """
    folder = inspect_draft(draft, inspect(DEMO_FOLDER))
    engine = load_draft(folder, lambda tensors, size: None, rows=1, limit=0)
    seen: list[str] = []
    engine.report(lambda: seen.append("compiles"), lambda: seen.append("moved"))
    seq = Sequence(b"s" * 16, 1, tuple(range(100)), Options(), 0, 9, phase=Phase.RUNNING)
    engine.admit(seq)
    engine.read([Span(seq, 0, 40, 0)])
    engine.read([Span(seq, 40, 40, 0)])
    assert seen == ["compiles", "moved", "moved"]
    seen.clear()
    assert len(engine.propose([Span(seq, 80, 20, 1)], 3)[seq]) == 3
    assert seen.count("moved") == 3
    engine.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (exchange, r'has "z" for the id 70, the model.s tokenizer has "f"'),
        (make_special, r"has the special token .* for the id 4000, the model.s tokenizer has"),
        (make_ordinary, r'"<\|endoftext\|>" for the id 0, the model.s tokenizer has the special'),
    ],
)
def test_another_tokenizer_is_refused_by_the_first_id_that_differs(
    tmp_path: Path, change: Change, words: str
) -> None:
    path = copied(tmp_path / "draft", "tokenizer.json", change)
    with pytest.raises(ModelLoadFailed, match=words) as caught:
        inspect_draft(path, inspect(DEMO_FOLDER))
    assert "must have the tokenizer of its model" in str(caught.value)
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("builtin:demo-chat", "for the id 0"),
        ("builtin:demo-embed", "generates no tokens"),
        ("builtin:counting", "the counting model drafts nothing"),
        ("builtin:none", "there is no 'builtin:none'"),
        ("/nowhere/at/all", "nowhere"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(path: str, words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=f"draft is {path!r}: .*{words}"):
        inspect_draft(path, inspect(DEMO_FOLDER))


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(**{"path": "builtin:demo", "draft": "/models/draft", **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculation": "auto", "deterministic": True}, "deterministic is true"),
        ({"speculation": "auto", "devices": 2}, "devices is 2"),
        ({"speculation": "draft", "devices": 2}, "devices is 2"),
        ({"speculation": "auto", "path": "builtin:counting"}, "the counting model checks no"),
        ({"speculation": "auto", "path": "builtin:demo-embed"}, "a model of texts checks no"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=words):
        open_source(config(**fields))


def test_the_settings_name_the_draft_model(draft: str) -> None:
    folder = inspect(DEMO_FOLDER)
    for setting in ("draft", "auto"):
        draft_folder = draft_of(folder, config(speculation=setting, draft=draft))
        assert draft_folder is not None and draft_folder.path == Path(draft)
    assert draft_of(folder, config(speculation="auto", draft="")) is None


def test_a_token_that_the_draft_model_has_no_row_for_is_read_as_another(draft: str) -> None:
    """A token beyond the draft model's embedding is read as NO_TOKEN.

    Models of one family have vocabularies of different padded sizes.
    """
    folder = inspect_draft(draft, inspect(DEMO_FOLDER))
    engine = load_draft(folder, lambda tensors, size: None, rows=2, limit=0)
    beyond, known = ((5, 6, token, 7, 8) for token in (folder.plan.embedding_rows, NO_TOKEN))
    options = Options.parse({"temperature": 0.0, "logprobs": True})
    rows = [Sequence(b"", 1, prompt, options, 1, 50) for prompt in (beyond, known)]
    for row in rows:
        engine.admit(row)
        row.phase = Phase.RUNNING
    proposals = engine.propose([Span(row, 0, row.length, 1) for row in rows], 3)
    drafts = [[(proposal.token, proposal.logprob) for proposal in proposals[row]] for row in rows]
    assert len(drafts[0]) == 3 and drafts[0] == drafts[1]
