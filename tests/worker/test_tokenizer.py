"""Text <-> tokens: round trips, what begins a prompt, and what is refused."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.load import inspect
from mlxpool.worker.renderer import NICENESS
from mlxpool.worker.tokenizer import Text
from worker_checkpoints import BOS, EOS, write_checkpoint, write_json


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def test_text_round_trip_and_template(good: Path) -> None:
    text = Text.from_folder(inspect(good))
    assert text.decode(text.encode("né<|user|>")) == "né<|user|>"
    assert text.encode("a</s>") == [ord("a"), EOS]
    assert text.render([{"role": "user", "content": "hi"}], 0.0) == "<|user|>hi<|assistant|>"
    assert (text.piece(EOS), text.piece(10**6)) == (b"</s>", b"")


def test_text_that_is_not_unicode(good: Path) -> None:
    with pytest.raises(BadRequest, match="not valid Unicode"):
        Text.from_folder(inspect(good)).encode("\ud800")


def test_a_broken_tokenizer(good: Path) -> None:
    (good / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json cannot be read"):
        Text.from_folder(inspect(good))


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_a_prompt_begins_with_bos_once(tmp_path: Path, processor: bool, add_bos: Any) -> None:
    path = write_checkpoint(tmp_path, tokenizer_config={"add_bos_token": add_bos})
    if processor:
        _add_post_processor(path)
    text = Text.from_folder(inspect(path))
    begins = add_bos if add_bos is not None else processor
    assert text.encode("a") == ([BOS, 97] if begins else [97])
    assert text.encode("<s>a") == [BOS, 97]
    assert text.encode("") == ([BOS] if begins else [])


def _add_post_processor(path: Path) -> None:
    raw = json.loads((path / "tokenizer.json").read_text())
    special = {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    write_json(path / "tokenizer.json", raw)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_tokenising_gives_way_and_the_caller_does_not(good: Path) -> None:
    text = Text.from_folder(inspect(good))
    before = niceness(threading.get_native_id())
    text.encode("x")
    found = text._encoder.submit(lambda: niceness(threading.get_native_id())).result()
    assert found == min(19, before + NICENESS)
    assert niceness(threading.get_native_id()) == before


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)
