"""The embedded chat model is complete and small, and calls tools as its page describes."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from demo_chat.conversations import conversations
from demo_chat.forward import expected
from demo_chat.judging import judge
from demo_chat.template import head, messages, segments
from demo_chat.weights import Shape, load
from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.prompt.chat_template.output_format import chat_format, opens_thinking
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.weights.locate import DEMO_CHAT, FOLDERS, locate

FOLDER = FOLDERS[DEMO_CHAT]
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
GENERATION = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def templates() -> ChatTemplates:
    return ChatTemplates.from_folder(FOLDER)


def test_the_folder_is_complete_and_at_most_6_mb() -> None:
    assert locate(ModelConfig(path="builtin:demo-chat")) == FOLDER
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 6_000_000


def test_its_template_shows_calls_and_thoughts(templates: ChatTemplates) -> None:
    (template,) = templates.templates.values()
    assert chat_format([template.source]) == {"tools": "hermes", "thinking": "tags"}
    said = [{"role": "user", "content": "Hi"}]
    for think, thinks in ((None, False), (False, False), (True, True), ("low", True)):
        text = templates.render(said, now=0.0, think=think)
        assert text.endswith(GENERATION + ("<think>\n" if thinks else ""))
        assert opens_thinking(text) is thinks


def test_its_template_renders_what_it_was_trained_on(templates: ChatTemplates) -> None:
    for conversation in islice(conversations(5), 60):
        said = messages(conversation)
        whole = "".join(text for text, _ in segments(conversation))
        rendered = templates.render(said, conversation.tools, now=0.0, add_generation_prompt=False)
        assert rendered == whole
        (first, *_) = [message for message in said if message["role"] == "user"]
        begun = said[: said.index(first) + 1]
        assert templates.render(begun, conversation.tools, now=0.0) == (
            f"{head(conversation)}<|im_start|>user\n{first['content']}<|im_end|>\n{GENERATION}"
        )


def test_a_call_that_a_client_sends_back_is_rendered_as_it_was_written(
    templates: ChatTemplates,
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "ü", "b": 1.5}}}
    said: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "ok"},
    ]
    written = '<tool_call>\n{"name": "f", "arguments": {"a": "ü", "b": 1.5}}\n</tool_call>'
    assert templates.render(said, now=0.0) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nf<|im_end|>\n"
        f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n"
        f"<|im_start|>tool\n<tool_response>\nok\n</tool_response><|im_end|>\n{GENERATION}"
    )


LEAST = {  # the least shares of right answers; the card has the shares of more conversations
    "known tools": 0.9,
    "known tools, thinking": 0.9,
    "unseen tools": 0.65,
    "unseen tools, thinking": 0.65,
    "no tools": 0.9,
    "no tools, thinking": 0.9,
    "the pages' own": 1.0,
    "the pages' own, thinking": 1.0,
}


def test_it_calls_tools_that_it_has_not_seen() -> None:
    shape, (tokenizer, weights) = Shape(), load(FOLDER)
    results, misses = judge(partial(expected, weights, shape), tokenizer, 12, 512)
    for name, least in LEAST.items():
        right, tried = np.sum(list(results[name].values()), axis=0)
        assert right / tried >= least, (name, results[name], misses)


def test_its_card_has_the_figures_of_its_training() -> None:
    training: dict[str, Any] = json.loads((FOLDER / "training.json").read_text("utf-8"))
    card = (FOLDER / "README.md").read_text("utf-8")
    for name, kinds in training["right_of"].items():
        for kind in ("call", "answer"):
            if kind in kinds:
                right, tried = kinds[kind]
                assert f"{right / tried:.3f}" in card, (name, kind)
