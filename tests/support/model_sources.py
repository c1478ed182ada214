"""Opens checkpoints for a compute thread, with engines of given settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.compute.model_source import ModelSource
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from support.model_engines import engine_of_kind


def source_of(
    folder: Path,
    kind: type[ModelEngine] = ModelEngine,
    *,
    deterministic: bool = False,
    **settings: Any,
) -> Callable[[ModelConfig], ModelSource]:
    """Returns a function that opens a folder with an engine of this class and these settings.

    The engine leaves out the slow warm-up.
    """

    def open_source(config: ModelConfig) -> ModelSource:
        files = inspect(folder)
        text = ChatTokenizer.from_folder(files)

        def build(on_progress: object) -> Engine:
            loaded = load(files, deterministic=deterministic)
            engine = engine_of_kind(kind, loaded, text, **{"blocks": 40, **settings})
            engine.warm_up = lambda on_progress=None: None  # type: ignore[method-assign]
            return engine

        opened = Opened("", files.context, files.plan.vocab_size, text)
        return ModelSource(opened, build, config.sequences)

    return open_source
