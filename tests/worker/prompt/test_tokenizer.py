"""Tests the tokenizer: round trips, the begin token of a prompt, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from tokenizers import Tokenizer

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.prompt.size_bound import check_ids
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from support import worker_tokenizers as zoo
from support.prompts import chat_ids
from support.worker_checkpoints import BOS, EOS, write_checkpoint, write_json

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def text_of(path: Path, **changes: Any) -> ChatTokenizer:
    """Returns the tokenizer of a checkpoint that is written with these changes."""
    return ChatTokenizer.from_folder(inspect(write_checkpoint(path, **changes)))


def test_text_round_trip_and_template(good: Path) -> None:
    text = ChatTokenizer.from_folder(inspect(good))
    assert text.decode(text.encode("né<|user|>")) == "né<|user|>"
    assert text.encode("a</s>") == [ord("a"), EOS]
    assert chat_ids(text, HI).ids == text.encode("<|user|>hi<|assistant|>")
    assert (text.piece(EOS), text.piece(10**6)) == (b"</s>", b"")


def test_text_that_is_not_unicode(good: Path) -> None:
    with pytest.raises(BadRequest, match="not valid Unicode"):
        ChatTokenizer.from_folder(inspect(good)).encode("\ud800")


def test_a_broken_tokenizer(good: Path) -> None:
    (good / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json cannot be read"):
        ChatTokenizer.from_folder(inspect(good))


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_a_prompt_begins_with_bos_once(tmp_path: Path, processor: bool, add_bos: Any) -> None:
    path = write_checkpoint(tmp_path, tokenizer_config={"add_bos_token": add_bos})
    if processor:
        _add_post_processor(path)
    text = ChatTokenizer.from_folder(inspect(path))
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


# ---- the end of the messages ---------------------------------------------------------------------

TALK = [*HI, {"role": "assistant", "content": "né"}, {"role": "user", "content": "こ"}]


@pytest.mark.parametrize("add_bos", [True, False])
def test_where_the_generation_prompt_begins(tmp_path: Path, add_bos: bool) -> None:
    text = text_of(tmp_path, tokenizer_config={"add_bos_token": add_bos})
    prompt = chat_ids(text, TALK)
    assert prompt.restore_at == len(prompt.ids) - 1
    assert text.piece(prompt.ids[prompt.restore_at]) == b"<|assistant|>"
    later = chat_ids(text, [*TALK, {"role": "assistant", "content": "x"}, *HI])
    assert later.ids[: prompt.restore_at] == prompt.ids[: prompt.restore_at]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content }}{% if add_generation_prompt %}{% endif %}",
        "{% if add_generation_prompt %}>{% endif %}{{ messages[0].content }}",
        "{{ messages[0].content }}{% if not add_generation_prompt %}{{ 1 / 0 }}{% endif %}",
    ],
    ids=["not asked for", "empty", "in front", "fails without"],
)
def test_an_unknown_generation_prompt_is_0(tmp_path: Path, template: str) -> None:
    text = text_of(tmp_path, tokenizer_config={"chat_template": template})
    assert chat_ids(text, HI).restore_at == 0


def with_template(tokenizer: Tokenizer, source: str) -> ChatTokenizer:
    nothing = TextSource("", "", (), {}, {}, None)
    return ChatTokenizer(tokenizer, ChatTemplates({"default": Template(source)}), nothing)


def test_a_token_across_the_boundary_is_not_counted() -> None:
    tokenizer = zoo.sentencepiece()
    source = "{{ messages[0].content }}{% if add_generation_prompt %}e fox{% endif %}"
    text = with_template(tokenizer, source)
    prompt = chat_ids(text, [{"role": "user", "content": " th"}])
    assert text.decode(prompt.ids[: prompt.restore_at]).strip() in ("", "th")


def test_a_generation_prompt_that_begins_with_plain_text() -> None:
    """The ids of a generation prompt are cut from the ids of the whole prompt.

    Encoded separately, the generation prompt would have other ids, as if it began a text.
    """
    source = "{{ messages[0].content }}{% if add_generation_prompt %} fox{% endif %}"
    text = with_template(zoo.sentencepiece(), source)
    prompt = chat_ids(text, [{"role": "user", "content": "the"}])
    assert 0 < prompt.restore_at < len(prompt.ids)
    assert text.decode(prompt.ids[: prompt.restore_at]) == "the"


# ---- in another process --------------------------------------------------------------------------


def test_a_source_gives_the_same_ids(tmp_path: Path) -> None:
    text = text_of(tmp_path, tokenizer_config={"add_bos_token": True})
    again = ChatTokenizer.from_source(TextSource(**asdict(text.source)))
    assert again.encode("né<|user|>") == text.encode("né<|user|>")
    assert chat_ids(again, HI) == chat_ids(text, HI)
    assert again.max_bytes_per_token == text.max_bytes_per_token == len("<|assistant|>")


def test_a_source_whose_file_has_changed_is_refused(good: Path) -> None:
    source = ChatTokenizer.from_folder(inspect(good)).source
    file = good / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ModelLoadFailed, match="has changed since the model was loaded"):
        ChatTokenizer.from_source(source)


@pytest.mark.parametrize(
    ("template", "begin"), [("", []), ("{{ bos_token }}", [BOS]), (" {{ bos_token }}", [32, BOS])]
)
def test_a_chat_has_the_begin_token_where_its_template_writes_it(
    tmp_path: Path, template: str, begin: list[int]
) -> None:
    """A chat begins with the begin token only if its template writes this token.

    This agrees with apply_chat_template. A plain text always begins with the begin token.
    """
    settings = {"add_bos_token": True, "chat_template": template + "{{ messages[0].content }}"}
    path = write_checkpoint(tmp_path, tokenizer_config=settings)
    _add_post_processor(path)
    text = ChatTokenizer.from_folder(inspect(path))
    assert chat_ids(text, HI).ids == [*begin, *b"hi"]
    assert text.encode("hi") == [BOS, *b"hi"]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    settings = {"chat_template": "{% for t in tools %}{{ t.function.name }}{% endfor %}"}
    text = text_of(tmp_path, tokenizer_config=settings)
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert chat_ids(text, HI, tools).ids == list(b"clock")
    with pytest.raises(BadRequest, match=r"tools\[0\] must be a map, got 5"):
        chat_ids(text, HI, [5])


# ---- the size of the vocabulary ------------------------------------------------------------------


def test_a_tokenizer_with_more_ids_than_the_model_has_rows(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"ids up to 255, the model has rows for 255"):
        text_of(tmp_path, vocab_size=255)


def test_an_added_token_that_prompts_have_needs_a_row(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"'<\|assistant\|>' \(id 259\).* rows for 259 ids"):
        text_of(tmp_path, vocab_size=259)
    add_bos = {"add_bos_token": True, "chat_template": "x"}
    with pytest.raises(ModelLoadFailed, match=r"'<s>' \(id 256\)"):
        text_of(tmp_path, vocab_size=256, tokenizer_config=add_bos)


def test_an_added_token_that_only_texts_may_have_is_accepted(tmp_path: Path) -> None:
    text = text_of(tmp_path, vocab_size=257, tokenizer_config={"chat_template": "x"})
    with pytest.raises(BadRequest, match="prompt: token id 257 is not below 257"):
        check_ids(text.encode("a</s>"), 257, "prompt")


def test_fewer_ids_than_rows_are_fine(tmp_path: Path) -> None:
    text = text_of(tmp_path, vocab_size=500)
    assert (text.piece(499), text.decode([97, 499, 98])) == (b"", "ab")


# ---- other families ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [zoo.sentencepiece, zoo.unigram, zoo.word_piece])
def test_other_families_from_a_folder(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    path = write_checkpoint(tmp_path, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {})
    text = ChatTokenizer.from_folder(inspect(path))
    ids = text.encode("the fox")
    assert ids == tokenizer.encode("the fox", add_special_tokens=False).ids or text.prefix
    begin = "[CLS] " if make is zoo.word_piece else ""
    assert text.decode(ids) == f"{begin}the fox"


def test_an_unsupported_decoder_fails_the_load(good: Path) -> None:
    raw = json.loads((good / "tokenizer.json").read_text())
    write_json(good / "tokenizer.json", {**raw, "decoder": {"type": "BPEDecoder", "suffix": "w"}})
    with pytest.raises(ModelLoadFailed, match="decoder has a step that is not supported"):
        ChatTokenizer.from_folder(inspect(good))
