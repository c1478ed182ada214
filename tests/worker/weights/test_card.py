"""Tests a model folder's card: the licence, and the recommended options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlxpool.worker.weights.card import MAX_LICENCE, licence, sampling


@pytest.mark.parametrize("name", ["LICENSE", "LICENSE.txt", "LICENCE.md"])
def test_the_text_of_a_licence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("MIT License\n")
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert licence(tmp_path) == "MIT License\n"


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\ntags:\n- x\n---\n# M\n", "apache-2.0"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("# M\nlicense: mit\n", None),
        ("---\nlicense_name: other\n---\n", None),
        ("", None),
    ],
)
def test_the_name_of_a_licence_in_the_models_card(
    tmp_path: Path, card: str, name: str | None
) -> None:
    (tmp_path / "README.md").write_text(card)
    assert licence(tmp_path) == name


def test_files_that_cannot_be_a_licence_count_as_none(tmp_path: Path) -> None:
    assert licence(tmp_path) is None
    os.mkfifo(tmp_path / "LICENSE")
    (tmp_path / "LICENSE.txt").write_text("x" * (MAX_LICENCE + 1))
    (tmp_path / "LICENSE.md").mkdir()
    assert licence(tmp_path) is None


def test_options_that_a_folder_recommends(tmp_path: Path) -> None:
    assert sampling(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    given = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    file.write_text(json.dumps({**given, "top_p": "high", "eos_token_id": [1]}))
    assert sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "repeat_penalty": 1.1}
    for text in ("[1]", "{", "[" * 100_000):
        file.write_text(text)
        assert sampling(tmp_path) == {}
