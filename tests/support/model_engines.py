"""Makes engines of loaded models, with settings as keywords."""

from __future__ import annotations

from typing import Any, TypeVar

from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.weights.load import LoadedModel

E = TypeVar("E", bound=ModelEngine)


def model_engine(
    loaded: LoadedModel,
    text: ChatTokenizer | TokenTable | None = None,
    *,
    draft: DraftEngine | None = None,
    **settings: Any,
) -> ModelEngine:
    return engine_of_kind(ModelEngine, loaded, text, draft=draft, **settings)


def engine_of_kind(
    kind: type[E],
    loaded: LoadedModel,
    text: ChatTokenizer | TokenTable | None = None,
    *,
    draft: DraftEngine | None = None,
    **settings: Any,
) -> E:
    return kind(loaded, text, EngineSettings(**settings), draft=draft)
