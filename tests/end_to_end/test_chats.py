"""Chats through the pool: templates that raise, fail or never end; tools; bad tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest, ModelLoadFailed
from support.pool import Pool, gone, until
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

HI: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    "tools": "{{ tools[0].function.name if tools }}{{ messages[-1].content }}",
    "strict": "{% if messages[0].role != 'user' %}{{ raise_exception('ask first') }}{% endif %}x",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "unsound": "fine\n{% if %}",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("models")
    for name, template in TEMPLATES.items():
        write_checkpoint(root / name, tokenizer_config={"chat_template": template})
    write_checkpoint(root / "narrow", vocab_size=200)
    names = [*TEMPLATES, "narrow"]
    tables = [f'[models.{name}]\npath = "{root / name}"' for name in names]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        yield running


@pytest.mark.parametrize("model", ["strict", "counting"])
def test_tools_for_a_model_that_reads_none_are_refused(client: Client, model: str) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(BadRequest, match="leave `tools` out"):
        client.generate(model, messages=messages, tools=tools, max_tokens=1)


def test_tools_and_the_answers_of_tools_reach_the_template(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    call = {"id": "a", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    messages: list[dict[str, object]] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "12:00"}]},
    ]
    result = client.generate("tools", messages=messages, tools=tools, max_tokens=1)
    assert result.usage["prompt_tokens"] == len("clock12:00")
    assert client.generate("tools", messages=HI, max_tokens=1).usage["prompt_tokens"] == len("hi")


def test_an_error_raised_by_a_template_reaches_the_client(client: Client) -> None:
    with pytest.raises(BadRequest, match="refused the messages: ask first"):
        client.generate("strict", messages=[{"role": "system", "content": "x"}])
    assert client.generate("strict", messages=HI, max_tokens=1).usage["prompt_tokens"] == 1


def test_an_endless_template_is_stopped_and_other_streams_continue(client: Client) -> None:
    stream = client.stream("endless", "x", max_tokens=400, ignore_eos=True)
    with pytest.raises(BadRequest, match="not done after 2 s"):
        client.generate("endless", messages=HI)
    assert len(stream.read().ids) == 400
    assert len(client.generate("endless", "x", max_tokens=2, ignore_eos=True).ids) == 2


def test_the_template_process_ends_with_its_worker(pool: Pool, client: Client) -> None:
    client.generate("strict", messages=HI, max_tokens=1)
    worker = psutil.Process(pool.worker("strict/0")["pid"])
    until(lambda: len(worker.children()) == 1, "it compiles nothing, and has one process")
    children = worker.children()
    pool.kill_worker("strict/0")
    until(lambda: gone(children[0]), "it ended with its worker")
    assert client.generate("strict", messages=HI, max_tokens=1).usage["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unsound", r"tokenizer_config\.json: chat template 'default' fails .* at line 2"),
        ("narrow", r"ids up to 255, the model has rows for 200"),
    ],
)
def test_a_model_with_a_bad_tokenizer_is_not_loaded(client: Client, name: str, words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=words):
        client.generate(name, "x", max_tokens=1)
