"""Tests tokens that tokenizer_config.json and older files list beside tokenizer.json.

The values of `of_transformers` are from transformers 5.24.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.compute.model_source import open_source
from mlxpool.worker.diagnose.check import check
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import DEMO_FOLDER
from support.prompts import chat_ids
from support.worker_checkpoints import write_json

HI = [{"role": "user", "content": "hi you"}]
PLAIN = [1, 299, 200, 537, 521, 0, 200, 1, 303, 200]
START = {"content": "<|im_start|>", "special": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(DEMO_FOLDER.with_name("demo_chat"), tmp_path / "m")


def settings(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    write_json(file, {**json.loads(file.read_text()), **changes})


def without_start(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].pop(1)
    write_json(folder / "tokenizer.json", tokenizer)


def notes(folder: Path) -> str:
    report = check("m", ModelConfig(path=str(folder)))
    assert report["problems"] == []
    return " / ".join(report["notes"])


def ids(folder: Path) -> list[int]:
    text = ChatTokenizer.from_folder(inspect(folder))
    again = ChatTokenizer.from_source(text.source)
    tokens = list(chat_ids(text, HI).ids)
    assert list(chat_ids(again, HI).ids) == tokens, "in the process that prepares requests"
    return tokens


def test_files_that_agree(folder: Path) -> None:
    assert ids(folder) == PLAIN
    assert notes(folder) == ""


def test_how_a_token_is_found_is_said_by_the_settings(folder: Path) -> None:
    settings(folder, added_tokens_decoder={"5": {**START, "lstrip": True}})
    of_transformers = [1, 299, 200, 537, 521, 0, 1, 303, 200]
    assert ids(folder) == of_transformers
    assert "the ids of tokenizer.json count: '<|im_start|>' is 1, in tokenizer_config.json 5" in (
        notes(folder)
    )


def test_a_token_that_only_the_settings_have(folder: Path) -> None:
    without_start(folder)
    assert len(ids(folder)) > len(PLAIN)
    settings(folder, added_tokens_decoder={"1": START})
    assert ids(folder) == PLAIN


def test_tokens_without_a_row_are_told_and_not_used(folder: Path) -> None:
    settings(
        folder,
        eos_token="<|nope|>",
        additional_special_tokens=["<|zz|>"],
        added_tokens_decoder={"1024": {"content": "<|new|>"}},
    )
    assert ids(folder) == PLAIN
    text = notes(folder)
    assert "has tokens that tokenizer.json has not, not used: '<|new|>' (id 1024)" in text
    assert "eos_token '<|nope|>'" in text and "additional_special_tokens '<|zz|>'" in text
    assert ChatTokenizer.from_folder(inspect(folder)).source.added == []


def test_older_files_that_say_otherwise(folder: Path) -> None:
    write_json(folder / "special_tokens_map.json", {"eos_token": "<|im_start|>"})
    write_json(folder / "added_tokens.json", {"<think>": 7})
    text = notes(folder)
    assert "'<think>' is 1016, in added_tokens.json 7" in text
    assert "eos_token is '<|im_end|>', in special_tokens_map.json '<|im_start|>'" in text


@pytest.mark.parametrize("wrong", [5, {"x": {}}, {"5": 5}, {"5": {"content": 5}}, {"5": {}}, [1]])
def test_settings_of_another_form_are_left_out(folder: Path, wrong: Any) -> None:
    settings(folder, added_tokens_decoder=wrong)
    write_json(folder / "special_tokens_map.json", {"eos_token": wrong})
    assert ids(folder) == PLAIN


def test_a_worker_logs_what_check_notes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings(folder, eos_token="<|im_start|>")
    with caplog.at_level(logging.WARNING, "mlxpool.worker"):
        open_source(ModelConfig(path=str(folder)))
    assert caplog.messages and " / ".join(caplog.messages) == notes(folder)
