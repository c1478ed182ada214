"""The tokens that begin and end a text, from all files that may name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.special_tokens import SpecialTokens, token_names
from support.worker_checkpoints import write_json

TOKENIZER = {
    "added_tokens": [{"id": 7, "content": "<|im_end|>"}],
    "model": {"vocab": {"</s>": 2, "word": 3}},
}
FILES = ("generation_config", "tokenizer_config", "special_tokens_map")


def read(path: Path, config: Any = None, **files: Any) -> SpecialTokens:
    for name in FILES:
        (path / f"{name}.json").unlink(missing_ok=True)
    for name, value in {"tokenizer": TOKENIZER, **files}.items():
        write_json(path / f"{name}.json", value)
    return SpecialTokens.read(path, config or {})


def eos(path: Path, config: Any = None, **files: Any) -> set[int]:
    return set(read(path, config, **files).eos_ids)


def test_ids_of_the_first_file_that_has_them(tmp_path: Path) -> None:
    config = {"eos_token_id": [4, 5], "text_config": {"eos_token_id": 6}}
    assert eos(tmp_path, config, generation_config={"eos_token_id": [8, 9]}) == {8, 9}
    assert eos(tmp_path, config, generation_config={}) == {4, 5}
    assert eos(tmp_path, {**config, "eos_token_id": None}) == {6}
    assert eos(tmp_path, {**config, "eos_token_id": []}) == {6}
    assert eos(tmp_path, generation_config={"eos_token_id": 0}) == {0}
    assert eos(tmp_path) == set()


@pytest.mark.parametrize("text", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_tokenizers_eos_token_is_always_included(tmp_path: Path, file: str, text: Any) -> None:
    files = {file: {"eos_token": text}}
    assert eos(tmp_path, **files) == {7}
    assert eos(tmp_path, {"eos_token_id": 4}, **files) == {4, 7}


def test_an_eos_token_in_the_vocabulary_and_one_that_is_unknown(tmp_path: Path) -> None:
    assert eos(tmp_path, tokenizer_config={"eos_token": "</s>"}) == {2}
    assert eos(tmp_path, tokenizer_config={"eos_token": "<none>"}) == set()
    unigram = {"model": {"vocab": [["<pad>", 0.0], ["</s>", 0.0]]}}
    assert eos(tmp_path, tokenizer=unigram, tokenizer_config={"eos_token": "</s>"}) == {1}


def test_an_eos_token_that_the_tokenizers_settings_add(tmp_path: Path) -> None:
    """If tokenizer.json also lists the added token, its id in tokenizer.json is used."""
    listed = {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}}
    assert eos(tmp_path, tokenizer={}, tokenizer_config=listed) == {9}
    here = {"added_tokens": [{"id": 8, "content": "<end>"}]}
    assert eos(tmp_path, tokenizer=here, tokenizer_config=listed) == {8}


def test_several_eos_tokens(tmp_path: Path) -> None:
    settings = {"eos_token": ["</s>", {"content": "<|im_end|>"}]}
    assert eos(tmp_path, tokenizer_config=settings) == {2, 7}
    assert token_names(tmp_path) == {"eos_token": "</s>"}


def notes(path: Path, config: Any = None, **files: Any) -> str:
    return " / ".join(read(path, config, **files).notes)


def test_files_that_agree_have_no_notes(tmp_path: Path) -> None:
    """There is no warning if one of the end tokens is the end token of the tokenizer's files.

    Qwen's files are like this.
    """
    ends = {"eos_token_id": [7, 2]}
    settings = {"eos_token": "<|im_end|>", "chat_template": "{{ x }}<|im_end|>"}
    assert notes(tmp_path, ends, generation_config=ends, tokenizer_config=settings) == ""
    assert notes(tmp_path, {"eos_token_id": 7}, tokenizer_config=settings) == ""


def test_an_end_that_only_another_file_names_counts_unless_it_is_a_word(tmp_path: Path) -> None:
    config, files = {"eos_token_id": [7, 3]}, {"generation_config": {"eos_token_id": 2}}
    assert eos(tmp_path, config, **files) == {2, 7}
    text = notes(tmp_path, config, **files)
    assert "generation_config.json at 2; config.json at 3, 7. An answer ends at 2, 7" in text
    assert "config.json: eos_token_id 3 does not end answers, because it is an ordinary" in text


@pytest.mark.parametrize("where", ["tokenizer_config", "chat_template"])
def test_the_token_with_which_the_chat_template_ends_turns(tmp_path: Path, where: str) -> None:
    files = {where: {"chat_template": "{{ messages[0].content }}<|im_end|>"}}
    try:
        assert eos(tmp_path, {"eos_token_id": 2}, **files) == {2, 7}
        text = notes(tmp_path, {"eos_token_id": 2}, **files)
        assert "config.json at 2; the chat template, with '<|im_end|>', at 7" in text
        channels = {where: {"chat_template": "<|channel|>final<|message|>x<|im_end|>"}}
        assert eos(tmp_path, {"eos_token_id": 2}, **channels) == {2}
    finally:
        (tmp_path / "chat_template.json").unlink(missing_ok=True)


def test_ends_that_are_no_tokens(tmp_path: Path) -> None:
    assert "no file names a token that ends a text" in notes(tmp_path)
    assert "eos_token_id 99 is no id of tokenizer.json" in notes(tmp_path, {"eos_token_id": 99})
    wrong = notes(tmp_path, {"eos_token_id": -1}, generation_config={"eos_token_id": 2})
    assert "config.json: eos_token_id is -1, must be a token id" in wrong


def test_the_newer_file_takes_precedence(tmp_path: Path) -> None:
    tokens = read(
        tmp_path,
        tokenizer_config={"bos_token": "new", "add_bos_token": False},
        special_tokens_map={"bos_token": "old", "eos_token": "</s>"},
    )
    assert (tokens.eos_ids, tokens.bos_token, tokens.add_bos) == (frozenset({2}), "new", False)
    assert token_names(tmp_path) == {"bos_token": "new", "eos_token": "</s>"}
    assert read(tmp_path, tokenizer_config={"add_bos_token": None}).add_bos is None


@pytest.mark.parametrize("wrong", ["2", 2.0, True, [1, "2"], -1, {"id": 2}])
def test_an_eos_token_id_that_is_no_id_is_named(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ModelLoadFailed, match=r"generation_config\.json: eos_token_id is"):
        read(tmp_path, generation_config={"eos_token_id": wrong})
    with pytest.raises(ModelLoadFailed, match=r"/config\.json: eos_token_id is"):
        read(tmp_path, {"eos_token_id": wrong})


@pytest.mark.parametrize("name", ["generation_config", "tokenizer_config", "special_tokens_map"])
def test_a_file_that_is_no_map_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadFailed, match=rf"{name}\.json holds a list, must be a map"):
        read(tmp_path, **{name: []})


@pytest.mark.parametrize("broken", [{"added_tokens": 5}, {"added_tokens": [5]}, {"model": 5}])
def test_a_tokenizer_of_another_form_has_no_eos_token(tmp_path: Path, broken: Any) -> None:
    assert eos(tmp_path, tokenizer=broken, tokenizer_config={"eos_token": "</s>"}) == set()


@pytest.mark.parametrize("id", ["x", None, 1.5, True, [7]])
def test_an_invalid_id_is_left_to_the_tokenizer(tmp_path: Path, id: Any) -> None:
    tokenizer = {"added_tokens": [{"id": id, "content": "</s>"}], "model": {"vocab": {"</s>": id}}}
    assert eos(tmp_path, tokenizer=tokenizer, tokenizer_config={"eos_token": "</s>"}) == set()
    vocabulary = {"model": tokenizer["model"]}
    assert eos(tmp_path, tokenizer=vocabulary, tokenizer_config={"eos_token": "</s>"}) == set()


@pytest.mark.parametrize("id", ["²", "9" * 5000, "-1"])
def test_a_listed_id_that_is_no_number(tmp_path: Path, id: str) -> None:
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": {id: {"content": "<|im_end|>"}}}
    assert eos(tmp_path, tokenizer_config=settings) == {7}


def test_a_lone_surrogate_in_a_name(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "a\ud800"})
    assert token_names(tmp_path) == {"bos_token": "a?"}
