"""Ollama's own client against a gateway of a running pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import httpx
import ollama
import pytest

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.pool import Pool, until
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if enable_thinking is false %}{% else %}<think>\n{% endif %}{# <tool_call> #}"
)
HI = [{"role": "user", "content": "hi"}]
LINE = "user: hi\n"  # the counting model's prompt for HI


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("models")
    write_checkpoint(root / "thinker", tokenizer_config={"chat_template": TEMPLATE})
    write_checkpoint(root / "bare", tokenizer_config={"chat_template": None})
    tables = [f'[models.{name}]\npath = "{root / name}"' for name in ("thinker", "bare")]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(pool: Pool) -> Iterator[GatewayThread]:
    with GatewayThread(pool.run_dir) as running:
        yield running


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[ollama.Client]:
    with ollama.Client(host=gateway.url) as made:
        yield made


def info(client: ollama.Client, name: str) -> Mapping[str, Any]:
    """The information about a model once the pool has inspected its files."""
    found = client.show(name).modelinfo
    return found if found and found["general.architecture"] else {}


def test_a_whole_answer(client: ollama.Client) -> None:
    answer = client.generate("counting", "hello", options={"num_predict": 4, "seed": 7})
    assert answer.response == text_of(expected_ids("user: hello\n", 7, 4))
    assert (answer.done, answer.done_reason) == (True, "length")
    assert (answer.eval_count, answer.prompt_eval_count) == (4, len("user: hello\n"))
    assert answer.total_duration and answer.total_duration >= (answer.eval_duration or 0) > 0


def test_raw_text_and_a_system_message(client: ollama.Client) -> None:
    options = {"num_predict": 3, "seed": 7}
    raw = client.generate("counting", "hello", raw=True, options=options)
    assert raw.response == text_of(expected_ids("hello", 7, 3))
    led = client.generate("counting:latest", "hello", system="Be.", options=options)
    assert led.response == text_of(expected_ids("system: Be.\nuser: hello\n", 7, 3))


def test_a_streamed_chat(client: ollama.Client) -> None:
    parts = list(client.chat("counting", HI, stream=True, options={"num_predict": 5, "seed": 7}))
    text = "".join(part.message.content or "" for part in parts)
    assert text == text_of(expected_ids(LINE, 7, 5))
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[-1].eval_count == 5 and parts[0].created_at


def test_logprobs(client: ollama.Client) -> None:
    answer = client.chat("counting", HI, options={"num_predict": 2, "seed": 7}, logprobs=True)
    assert answer.logprobs is not None
    assert "".join(one.token for one in answer.logprobs) == answer.message.content


def test_an_empty_request_loads_the_model(client: ollama.Client) -> None:
    assert client.generate("bare").done_reason == "load"
    assert "bare" in [model.model for model in client.ps().models]
    assert next(iter(client.chat("bare", stream=True))).done_reason == "load"


def test_ps_has_what_a_model_holds_now(client: ollama.Client, pool: Pool) -> None:
    client.generate("bare", "hello", raw=True, options={"num_predict": 2})
    disk = next(model.size for model in client.list().models if model.model == "bare")

    def shown_total() -> int | None:
        """Its size, once ps of the pool and of the gateway show the same heartbeat."""
        total = pool.worker("bare/0")["memory"].get("total")
        size = next(model.size for model in client.ps().models if model.model == "bare")
        return total if size == total else None

    total = until(shown_total, "both show the same")
    memory = pool.worker("bare/0")["memory"]
    assert disk and total > disk and total >= memory["weights"] + memory["prefix"]
    loaded = next(model for model in client.ps().models if model.model == "bare")
    assert loaded.size == loaded.size_vram


def test_the_lists_of_models(client: ollama.Client) -> None:
    assert {model.model for model in client.list().models} == {
        "demo", "demo-embed", "counting", "thinker", "bare",
    }  # fmt: skip
    until(lambda: info(client, "thinker"), "the model was looked at")
    shown = client.show("thinker")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.details is not None and shown.details.family == "llama"
    assert info(client, "thinker")["llama.context_length"] == 512
    with pytest.raises(ollama.ResponseError, match="no model 'none'") as caught:
        client.show("none")
    assert caught.value.status_code == 404


def test_thinking_is_split_from_the_answer(client: ollama.Client) -> None:
    """The prompt opens the thoughts, and random weights never close them."""
    until(lambda: info(client, "thinker"), "the model was looked at")
    options = {"num_predict": 12, "seed": 3}
    for think in (True, None, "low"):
        thought = client.chat("thinker", HI, think=think, options=options).message
        assert thought.thinking and not thought.content
    said = client.chat("thinker", HI, think=False, options=options).message
    assert said.content and not said.thinking
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat("counting", HI, think=True)


def test_a_model_without_a_template(client: ollama.Client) -> None:
    until(lambda: info(client, "bare"), "the model was looked at")
    assert client.generate("bare", "hello", options={"num_predict": 3}).prompt_eval_count == 5
    with pytest.raises(ollama.ResponseError, match="no chat template"):
        client.generate("bare", "hello", system="x")
    with pytest.raises(ollama.ResponseError, match="no chat template"):
        client.chat("bare", HI)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"format": "json"}, "'format' is not supported"),
        ({"keep_alive": 5}, "'keep_alive' is not supported"),
        ({"images": ["aGk="]}, "this model does not support image input"),
        ({"images": ["?"]}, r"images\[0\] is not base64"),
        ({"suffix": "x"}, "'suffix' is not supported"),
        ({"template": "x"}, "'template' is not supported"),
        ({"context": [1]}, "'context' is not supported"),
        ({"options": {"num_ctx": 10**6}}, "num_ctx is 1000000, the context of the model is 131072"),
        ({"options": {"num_thread": 3}}, "'options.num_thread' is not supported"),
        ({"options": {"temperature": -1}}, "option 'options.temperature' is -1"),
        ({"options": {"bogus": 1}}, "unknown field 'options.bogus'"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    client: ollama.Client, more: dict[str, object], words: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=words) as caught:
        client.generate("counting", "x", **more)  # type: ignore[call-overload]
    assert caught.value.status_code == 400


def test_the_context_of_a_request_is_a_real_bound(client: ollama.Client) -> None:
    found = client.generate("counting", "abcd", raw=True, options={"num_ctx": 20, "seed": 3})
    assert found.response == text_of(expected_ids("abcd", 3, 16))
    assert (found.eval_count, found.done_reason) == (16, "length")
    with pytest.raises(ollama.ResponseError, match=r"20 tokens, the context is 20") as caught:
        client.generate("counting", "x" * 20, raw=True, options={"num_ctx": 20})
    assert caught.value.status_code == 400


@pytest.mark.parametrize("path", ["generate", "chat"])
def test_truncate_shift_and_num_keep(gateway: GatewayThread, path: str) -> None:
    text = "".join(chr(97 + n % 26) for n in range(40))
    prompt = {"prompt": text} if path == "generate" else {"messages": [{**HI[0], "content": text}]}
    options = {"num_ctx": 20, "num_keep": 2, "seed": 3, "num_predict": 50}
    body = {"model": "counting", **prompt, "options": options, "stream": False}
    url = f"{gateway.url}/api/{path}"
    assert httpx.post(url, json=body).status_code == 400
    found = httpx.post(url, json={**body, "truncate": True, "shift": True}).json()
    whole = found["response"] if path == "generate" else found["message"]["content"]
    given = f"user: {text}\n"
    assert whole == text_of(expected_ids(given[:2] + given[-17:], 3, 50))
    assert (found["prompt_eval_count"], found["eval_count"]) == (19, 50)
    short = httpx.post(url, json={**body, "truncate": True}).json()
    assert (short["eval_count"], short["done_reason"]) == (1, "length")
    wrong = httpx.post(url, json={**body, "truncate": "yes"})
    assert wrong.status_code == 400 and "'truncate' must be true or false" in wrong.text


def test_paths_that_are_not_built_answer_501(client: ollama.Client, gateway: GatewayThread) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.pull("x"),
        lambda: client.push("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
    )
    for call in calls:
        with pytest.raises(ollama.ResponseError, match="is not supported by mlxpool") as caught:
            call()
        assert caught.value.status_code == 501
    assert httpx.get(f"{gateway.url}/api/version").json() == {"version": version("mlxpool")}
    assert httpx.get(gateway.url).status_code == 200


def test_curl_needs_no_content_type_and_a_page_in_a_browser_does(gateway: GatewayThread) -> None:
    body = '{"model": "counting", "prompt": "x", "stream": false, "options": {"num_predict": 1}}'
    headers = {"content-type": "application/x-www-form-urlencoded"}
    url = f"{gateway.url}/api/generate"
    assert httpx.post(url, content=body, headers=headers).status_code == 200
    headers["origin"] = "http://elsewhere"
    assert httpx.post(url, content=body, headers=headers).status_code == 415
