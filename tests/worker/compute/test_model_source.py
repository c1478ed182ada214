"""The memory that a worker keeps after it has opened a model."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.compute.model_source import MIN_MODEL_CONTEXT, open_generator, open_source
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from support.worker_checkpoints import write_checkpoint


def tokenizers_in_memory() -> int:
    """Returns the number of this program's objects that hold a tokenizer."""
    gc.collect()
    return sum(isinstance(each, ChatTokenizer) for each in gc.get_objects())


def test_no_tokenizer_is_kept_once_a_model_is_checked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", vocab_size=300)
    before = tokenizers_in_memory()
    source = open_generator(ModelConfig(path=str(folder)))
    assert tokenizers_in_memory() == before
    table = source.opened.text
    assert isinstance(table, TokenTable)
    text = ChatTokenizer.from_folder(inspect(folder))
    assert tokenizers_in_memory() == before + 1
    assert table.max_bytes_per_token == text.max_bytes_per_token
    for token in (*range(-1, 301), 2**40):
        assert table.piece(token) == (text.piece(token) if 0 <= token < 300 else b"")


def test_batch_has_to_be_more_than_sequences() -> None:
    words = r"batch is 8 tokens, sequences is 8: .*; raise batch or lower sequences"
    with pytest.raises(ModelLoadFailed, match=words):
        open_generator(ModelConfig(path="builtin:counting", batch=8, sequences=8))


@pytest.mark.parametrize("path", ["builtin:counting", "builtin:demo"])
def test_a_context_has_a_place_for_the_warm_up(path: str) -> None:
    for context in (1, 3):
        with pytest.raises(ModelLoadFailed, match=f"context is {context} tokens, must be at least"):
            open_generator(ModelConfig(path=path, context=context))
    assert (
        open_generator(ModelConfig(path=path, context=MIN_MODEL_CONTEXT)).opened.context
        == MIN_MODEL_CONTEXT
    )


def test_the_least_context_loads() -> None:
    config = ModelConfig(path="builtin:demo", context=MIN_MODEL_CONTEXT, sequences=1)
    source = open_generator(config)
    engine = source.load(lambda tensors, size: None)
    engine.warm_up(lambda: None)
    engine.close()


def test_batch_bounds_the_steps_of_the_counting_model() -> None:
    def loaded(batch: int) -> Engine:
        source = open_generator(ModelConfig(path="builtin:counting", batch=batch))
        return source.load(lambda tensors, size: None)

    assert loaded(100).limits.lines == 100
    assert loaded(0).limits.lines > 100


def test_an_engine_that_cannot_compute_the_model_is_refused(tmp_path: Path) -> None:
    unknown = write_checkpoint(tmp_path / "unknown", weights={"w": np.zeros(1)}, model_type="none")
    with pytest.raises(ModelLoadFailed, match='engine = "mlx-lm", but mlx-lm has no model_type'):
        open_generator(ModelConfig(path=str(unknown), engine="mlx-lm"))
    with pytest.raises(ModelLoadFailed, match="model_type 'none', which is not supported"):
        open_generator(ModelConfig(path=str(unknown), engine="own"))


def test_what_is_not_divided_between_devices_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="devices is 2, but the counting model is not"):
        open_source(ModelConfig(path="builtin:counting", devices=2))
    with pytest.raises(ModelLoadFailed, match="devices is 2, but a model of texts is not"):
        open_source(ModelConfig(path="builtin:demo-embed", devices=2))
    folder = write_checkpoint(tmp_path / "model")
    with pytest.raises(ModelLoadFailed, match="deterministic = true is not built for devices = 2"):
        open_source(ModelConfig(path=str(folder), devices=2, deterministic=True))
    with pytest.raises(ModelLoadFailed, match=r"devices is 4, but .* num_key_value_heads 2"):
        open_source(ModelConfig(path=str(folder), devices=4))


def test_a_divided_model_is_that_of_one_device_to_clients(tmp_path: Path) -> None:
    """Streams can move between a worker with two devices and a worker with one device."""
    folder = str(write_checkpoint(tmp_path / "model"))
    single, divided = (
        open_source(ModelConfig(path=folder, devices=count)).opened for count in (1, 2)
    )
    assert (single.digest, single.context, single.vocab_size) == (
        divided.digest,
        divided.context,
        divided.vocab_size,
    )
