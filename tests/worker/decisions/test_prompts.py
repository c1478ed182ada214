"""Compares ids of questions' prompts, and of answers after them, with the ids of whole texts."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_uppercase
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxpool.common.errors import BadRequest, ContextExceeded
from mlxpool.common.protocol.decisions import Question
from mlxpool.worker.decisions.prompts import THINKS, AskQuestions, Prompts, prompts_of, worded
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from support import worker_tokenizers as zoo

CHAT = (
    "{% for m in messages %}<|user|>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}</s>\n{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
ASKED: list[dict[str, Any]] = [
    {"question": "Does the fox jump?"},
    {"question": "Who is lazy?", "choices": ["fox", "dog", "né"]},
    {"question": "How quick is it?", "scale": [0, 12]},
    {"choices": ["the fox's dog", "print(i)"]},
    {"question": "\nwhy"},
]
FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": zoo.byte_level,
    "sentencepiece": zoo.sentencepiece,
    "sentencepiece, no strip": lambda: zoo.sentencepiece(strip=False),
}


def tokenizer(
    make: Callable[[], Tokenizer], template: str = CHAT, begin: tuple[int, ...] = (1,)
) -> ChatTokenizer:
    templates = {"default": Template(template)} if template else {}
    source = TextSource("", "", begin, {}, {}, None)
    return ChatTokenizer(make(), ChatTemplates(templates), source)


def ask(
    text: ChatTokenizer, asked: list[dict[str, Any]], chat: bool = True, **changes: Any
) -> Prompts:
    fields = {"prompt": TEXT, "think": None, "now": 0.0, "context": 100_000, **changes}
    return prompts_of(text, AskQuestions(questions=asked, chat=chat, **fields))


def whole(text: ChatTokenizer, asked: dict[str, Any], chat: bool) -> list[int]:
    """The ids of one question's prompt, rendered and tokenised by itself."""
    words = f"{TEXT}\n\n{worded(Question.parse('', asked), chat=chat)}"
    if chat:
        words = text.render([{"role": "user", "content": words}], [], 0.0, None).text
    return text.encode(words, begins=not chat)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_whole_texts_and_begin_alike(family: str, chat: bool) -> None:
    text = tokenizer(FAMILIES[family], CHAT if chat else "")
    prompts = ask(text, ASKED, chat)
    assert len(prompts.shared) > len(text.encode(TEXT)) - 8
    for tail, asked in zip(prompts.tails, ASKED, strict=True):
        assert prompts.shared + tail == whole(text, asked, chat)
        assert tail


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_what_follows_the_prompt_in_a_whole_text(family: str, chat: bool) -> None:
    text = tokenizer(FAMILIES[family], CHAT if chat else "")
    prompts = ask(text, ASKED, chat)
    begin = "" if chat else " "
    expected = {0: ("Yes", "No"), 1: "ABC", 2: [str(n) for n in range(13)], 3: "AB"}
    for index, labels in expected.items():
        prompt = text.decode((prompts.shared + prompts.tails[index])[not chat :])
        for label, paths in zip(labels, prompts.answers[index].paths, strict=True):
            joint = text.encode(prompt + begin + label)
            before = text.encode(prompt)
            assert joint[: len(before)] == before
            assert tuple(joint[len(before) :]) in paths
            for path in paths:
                assert text.decode(list(path)).strip().lower() in (label.lower(), f"\n{label}")


def test_numbers_of_several_digits_and_letters() -> None:
    digits = ask(tokenizer(zoo.sentencepiece), [{"scale": [1, 10]}]).answers[0]
    lengths = [{len(path) for path in paths} for paths in digits.paths]
    assert lengths[:9] == [lengths[0]] * 9 and max(lengths[9]) == max(lengths[0]) + 1
    text = tokenizer(zoo.byte_level)
    letters = ask(text, [{"choices": [f"c{n}" for n in range(26)]}]).answers[0]
    written = [{text.decode(list(path)).strip() for path in paths} for paths in letters.paths]
    assert written == [{letter} for letter in ascii_uppercase]
    assert list(letters.branches()) == [()]


def test_a_template_that_changes_questions_is_rendered_for_each() -> None:
    shouts = "{% for m in messages %}<|user|>{{ m.content | upper }}{% endfor %}</s>"
    text = tokenizer(zoo.byte_level, shouts)
    prompts = ask(text, ASKED[:3])
    for tail, asked in zip(prompts.tails, ASKED, strict=False):
        assert prompts.shared + tail == whole(text, asked, chat=True)
    assert len(prompts.shared) > 200


def test_a_template_that_begins_with_the_end_of_the_text_shares_nothing_wrong() -> None:
    backwards = "{% for m in messages %}{{ m.content[-20:] }}<|user|>{{ m.content }}{% endfor %}"
    text = tokenizer(zoo.byte_level, backwards)
    prompts = ask(text, ASKED[:2])
    for tail, asked in zip(prompts.tails, ASKED, strict=False):
        assert prompts.shared + tail == whole(text, asked, chat=True)


def test_labels_with_the_same_tokens_are_refused_by_name() -> None:
    with pytest.raises(BadRequest, match=r"questions\[7\]: .* 'a' and 'b' the same tokens"):
        ask(tokenizer(zoo.words, ""), [{"choices": ["a", "b"]}], chat=False, first=7)


def test_a_template_that_opens_thoughts_is_refused() -> None:
    thinks = CHAT.replace("</s>\n", "</s><think>\n")
    with pytest.raises(BadRequest, match=THINKS):
        ask(tokenizer(zoo.byte_level, thinks), ASKED)


def test_a_question_that_does_not_fit_is_named() -> None:
    text = tokenizer(zoo.byte_level)
    size = len(text.encode(TEXT))
    asked = [{"question": "why?"}, {"question": "why " * 100}]
    with pytest.raises(
        ContextExceeded, match=r"questions\[65\]: text and question have \d+"
    ) as failed:
        ask(text, asked, first=64, context=size + 100)
    assert failed.value.details["context"] == size + 100
