"""Tests the values of `speculation` that an engine supports, and the errors for other values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest

from support.constrained_answers import demo
from support.draft_models import write_draft
from support.predicting_models import write_predicting
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import Counting  # noqa: E402
from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.compute import drafting_rows  # noqa: E402
from mlxpool.worker.compute.drafting_rows import make_drafter, make_speculator  # noqa: E402
from mlxpool.worker.draft_model.engine import DraftModelEngine  # noqa: E402
from mlxpool.worker.engine.counting_engine import CountingEngine  # noqa: E402
from mlxpool.worker.engine.engine import Engine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.speculation.best_drafter import BestDrafter  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

SETTINGS = ["off", "ngram", "mtp", "draft", "auto"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(inspect(write_draft(tmp_path_factory.mktemp("models") / "draft")))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    size = demo()[0].plan.vocab_size
    path = write_predicting(tmp_path_factory.mktemp("model"), "qwen3_next", vocab_size=size)
    return load(inspect(path, predicts=True))


def drafting(loaded: LoadedModel, draft: LoadedModel | None = None) -> ModelEngine:
    second = None if draft is None else DraftModelEngine(draft, demo()[2], rows=1, limit=0)
    return model_engine(loaded, demo()[1], blocks=4, draft=second)


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_checks_no_drafts_is_refused_by_name(setting: str, tmp_path: Path) -> None:
    """An engine that cannot check drafts refuses all settings except "off" and "auto"."""
    exact = load(demo()[0], deterministic=True)
    states = {**QWEN3_NEXT, "num_hidden_layers": 2}
    recurrent = load(inspect(write_checkpoint(tmp_path, **states)))
    engines: list[tuple[Engine, str]] = [
        (CountingEngine(Counting(), 1000), "the counting model cannot check drafts"),
        (model_engine(exact, demo()[1], blocks=4), "deterministic is true"),
        (model_engine(recurrent, blocks=4), "states or windows"),
    ]
    for engine, words in engines:
        if setting in ("off", "auto"):
            assert make_speculator(setting, engine, "some") is None
        else:
            with pytest.raises(ModelLoadFailed, match=f"speculation is '{setting}', but .*{words}"):
                make_speculator(setting, engine, "some")


@pytest.mark.parametrize(
    ("setting", "words"), [("mtp", "has no head"), ("draft", "has no draft model")]
)
def test_a_drafter_that_is_not_there_is_refused_by_name(
    loaded: LoadedModel, setting: str, words: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=f"'{setting}', but models.demo {words}.*'auto'"):
        make_speculator(setting, drafting(loaded), "demo")


def test_a_vocabulary_that_n_grams_cannot_have_leaves_the_head(
    predicting: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting_rows, "MAX_TOKENS", 100)
    assert make_drafter("auto", drafting(predicting), monotonic).name == "mtp"


def test_auto_has_the_best_of_what_is_there(
    loaded: LoadedModel, draft: LoadedModel, predicting: LoadedModel
) -> None:
    cases: list[tuple[ModelEngine, list[str]]] = [
        (drafting(loaded), ["ngram"]),
        (drafting(loaded, draft), ["ngram", "draft"]),
        (drafting(predicting), ["ngram", "mtp"]),
        (drafting(predicting, draft), ["ngram", "mtp", "draft"]),
    ]
    for engine, names in cases:
        drafter: Any = make_drafter("auto", engine, monotonic)
        several = isinstance(drafter, BestDrafter)
        drafters = drafter.drafters if several else [drafter]
        assert [member.name for member in drafters] == names
        assert drafter.name == ("auto" if several else "ngram")


@pytest.mark.parametrize("setting", ["draft", "auto"])
def test_a_draft_model_of_what_checks_no_drafts_is_refused(
    draft: LoadedModel, setting: str, tmp_path: Path
) -> None:
    """The draft model is also refused with "auto", because it would be loaded in vain."""
    recurrent = load(inspect(write_checkpoint(tmp_path, **{**QWEN3_NEXT, "num_hidden_layers": 2})))
    drafts = DraftModelEngine(draft, demo()[2], rows=1, limit=0)
    engine = model_engine(recurrent, blocks=4, draft=drafts)
    with pytest.raises(ModelLoadFailed, match="leave speculation and draft out"):
        make_speculator(setting, engine, "some")


def _above_this_process(size: int) -> int:
    """Returns a memory limit that is `size` bytes above the memory in use by this process."""
    return psutil.Process().memory_info().rss + size


def test_room_is_left_for_the_draft_model(loaded: LoadedModel, draft: LoadedModel) -> None:
    """The limit includes the draft model's weights and all of its rows; `memory` shows them."""
    limit = _above_this_process(2**30)
    drafts = DraftModelEngine(draft, demo()[2], rows=4, limit=limit)
    plain = model_engine(loaded, demo()[1], limit=limit, prefix_bytes=2**20)
    beside = model_engine(loaded, demo()[1], limit=limit, prefix_bytes=2**20, draft=drafts)
    assert (
        drafts.held_bytes
        > draft.weight_bytes + 4 * drafts.context * drafts.engine.inspect().budget.block // 256
    )
    less = plain.inspect().budget.free_blocks - beside.inspect().budget.free_blocks
    blocks = drafts.held_bytes / beside.inspect().budget.block
    assert blocks - 2 <= less <= blocks + 2 + 2**26 / beside.inspect().budget.block
    assert plain.memory().draft == 0 < draft.weight_bytes <= beside.memory().draft


def test_a_draft_model_is_warmed_up_in_the_room_that_a_small_pool_leaves(
    loaded: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool shrinks for the draft model's warm-up, and grows again after it."""
    drafts = DraftModelEngine(draft, demo()[2], rows=1, limit=0)
    engine = model_engine(
        loaded,
        demo()[1],
        layout="pool",
        limit=_above_this_process(2**30),
        prefix_bytes=2**20,
        draft=drafts,
    )
    before, blocks = engine.inspect().layout.blocks, []
    warm_up = drafts.warm_up

    def observed(on_progress: Callable[[], None]) -> None:
        blocks.append(engine.inspect().layout.blocks)
        warm_up(on_progress)

    monkeypatch.setattr(drafts, "warm_up", observed)
    engine.warm_up()
    assert len(blocks) == 1 and blocks[0] < before and blocks[0] < engine.inspect().layout.blocks
