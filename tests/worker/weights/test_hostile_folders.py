"""Folders made to hang, to exhaust memory or to break messages: each is refused with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpool.worker.layers.config_fields import MAX_INTEGER, MAX_MODULES
from mlxpool.worker.prompt.chat_template.templates import MAX_TEMPLATE_CHARS
from mlxpool.worker.weights import json_files
from support.worker_checkpoints import refusal_of_worker as refusal
from support.worker_checkpoints import write_checkpoint, write_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


def change(file: Path, **changes: Any) -> None:
    write_json(file, {**json.loads(file.read_text()), **changes})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("max_position_embeddings", 10**30, f"a number of 100 bits, must be at most {MAX_INTEGER}"),
        (
            "max_position_embeddings",
            10**400,
            f"a number of 1329 bits, must be at most {MAX_INTEGER}",
        ),
        ("num_hidden_layers", 10**7, f"10000000, must be at most {MAX_MODULES}"),
        ("num_hidden_layers", 10**30, f"must be at most {MAX_MODULES}"),
        ("rms_norm_eps", float("inf"), "inf, must be finite"),
        ("rms_norm_eps", 10**400, "a number of 1329 bits, must be finite"),
    ],
)
def test_absurd_numbers(folder: Path, key: str, value: float, words: str) -> None:
    change(folder / "config.json", **{key: value})
    message = refusal(folder)
    assert repr(key) in message and message.endswith(words)


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)


def vast(file: Path) -> None:
    """Makes a sparse file, which uses hardly any disk space."""
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.truncate(file, 2**40)


@pytest.mark.parametrize(
    ("name", "deed", "words"),
    [
        ("model.safetensors", pipe, "not a regular file"),
        ("additional_chat_templates/a.jinja", pipe, "not a regular file"),
        *(
            (name, vast, f"has {2**40} bytes, at most {json_files.MAX_FILE_BYTES}")
            for name in (
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
                "chat_template.json",
                "chat_template.jinja",
                "additional_chat_templates/a.jinja",
                "model.safetensors.index.json",
            )
        ),
    ],
)
def test_endless_and_huge_files(
    folder: Path, name: str, deed: Callable[[Path], None], words: str
) -> None:
    deed(folder / name)
    message = refusal(folder)
    assert words in message and str(folder / name) in message


def test_a_huge_template_inside_another_file(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template="x" * (MAX_TEMPLATE_CHARS + 1))
    assert f"has {MAX_TEMPLATE_CHARS + 1} characters, at most {MAX_TEMPLATE_CHARS}" in refusal(
        folder
    )


def test_templates_with_invalid_names(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=[{"name": ["x"], "template": "x"}])
    assert "must be text or a list of {name, template}" in refusal(folder)


def test_a_file_name_that_is_not_utf8(folder: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/model\xff.safetensors")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system has only names that are text")
    (folder / "model.safetensors").unlink()
    assert "model\\udcff.safetensors: truncated" in refusal(folder)
