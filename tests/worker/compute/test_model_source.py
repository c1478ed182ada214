"""What a worker keeps of a model that it has opened."""

from __future__ import annotations

import gc
from pathlib import Path

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.compute.model_source import open_source
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from support.worker_checkpoints import write_checkpoint


def tokenizers_in_memory() -> int:
    """How many of our objects hold one."""
    gc.collect()
    return sum(isinstance(each, ChatTokenizer) for each in gc.get_objects())


def test_no_tokenizer_is_kept_once_a_model_is_checked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", vocab_size=300)
    before = tokenizers_in_memory()
    source = open_source(ModelConfig(path=str(folder)))
    assert tokenizers_in_memory() == before
    table = source.opened.text
    assert isinstance(table, TokenTable)
    text = ChatTokenizer.from_folder(inspect(folder))
    assert tokenizers_in_memory() == before + 1
    assert table.max_bytes_per_token == text.max_bytes_per_token
    for token in (*range(-1, 301), 2**40):
        assert table.piece(token) == (text.piece(token) if 0 <= token < 300 else b"")
