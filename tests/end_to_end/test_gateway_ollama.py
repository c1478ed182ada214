"""Ollama's own client against a gateway of a running pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from mlxpool.worker.engine.counting_engine import token_at
from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until
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
    (root / "thinker" / "LICENSE").write_text("MIT License")
    (root / "thinker" / "generation_config.json").write_text('{"temperature": 0.6}')
    write_checkpoint(root / "bare", tokenizer_config={"chat_template": None})
    tables = [f'[models.{name}]\npath = "{root / name}"' for name in ("thinker", "bare")]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        until(
            lambda: all(model["type"] for model in running.ask("models")["models"]),
            "the files of every model were looked at: they say how its chats are written",
        )
        yield running


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[ollama.Client]:
    with ollama.Client(host=gateway.url) as new_client:
        yield new_client


def info(client: ollama.Client, name: str) -> Mapping[str, Any]:
    """Returns the information about a model after the inspection of its files."""
    fields = client.show(name).modelinfo
    return fields if fields and fields["general.architecture"] else {}


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
    assert "".join(entry.token for entry in answer.logprobs) == answer.message.content


def test_an_empty_request_loads_the_model(client: ollama.Client) -> None:
    assert client.generate("bare").done_reason == "load"
    assert "bare" in [model.model for model in client.ps().models]
    assert next(iter(client.chat("bare", stream=True))).done_reason == "load"


def test_ps_has_what_a_model_holds_now(client: ollama.Client, pool: Pool) -> None:
    client.generate("bare", "hello", raw=True, options={"num_predict": 2})
    disk = next(model.size for model in client.list().models if model.model == "bare")

    def shown_total() -> int | None:
        """Returns the model's size if `ps` of pool and gateway show the same size, else None."""
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
        "demo", "demo-chat", "demo-embed", "counting", "thinker", "bare",
    }  # fmt: skip
    until(lambda: info(client, "thinker"), "the model was looked at")
    shown = client.show("thinker")
    assert shown.capabilities == ["completion", "tools", "thinking", "format"]
    assert client.show("counting").capabilities == ["completion"]
    assert shown.details is not None and shown.details.family == "llama"
    assert info(client, "thinker")["llama.context_length"] == 512
    with pytest.raises(ollama.ResponseError, match="no model 'none'") as caught:
        client.show("none")
    assert caught.value.status_code == 404


def test_thinking_is_split_from_the_answer(client: ollama.Client) -> None:
    """The whole answer is thoughts: the prompt begins them, and random weights do not end them."""
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
        ({"keep_alive": "soon"}, "'keep_alive' must be seconds, or a duration such as '5m'"),
        ({"images": ["aGk="]}, "this model does not support image input"),
        ({"suffix": "x"}, "suffix is not supported: the tokenizer"),
        ({"options": {"think": True}}, "unknown field 'options.think'; did you mean 'think'"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    client: ollama.Client, more: dict[str, object], words: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=words) as caught:
        client.generate("counting", "x", **more)  # type: ignore[call-overload]
    assert caught.value.status_code == 400


def test_the_context_of_a_request_is_a_real_bound(client: ollama.Client) -> None:
    answer = client.generate("counting", "abcd", raw=True, options={"num_ctx": 20, "seed": 3})
    assert answer.response == text_of(expected_ids("abcd", 3, 16))
    assert (answer.eval_count, answer.done_reason) == (16, "length")
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
    assert httpx.post(url, json=body, timeout=PATIENCE).status_code == 400
    answer = httpx.post(
        url, json={**body, "truncate": True, "shift": True}, timeout=PATIENCE
    ).json()
    whole = answer["response"] if path == "generate" else answer["message"]["content"]
    given = f"user: {text}\n"
    assert whole == text_of(expected_ids(given[:2] + given[-17:], 3, 50))
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (19, 50)
    short = httpx.post(url, json={**body, "truncate": True}, timeout=PATIENCE).json()
    assert (short["eval_count"], short["done_reason"]) == (1, "length")
    wrong = httpx.post(url, json={**body, "truncate": "yes"}, timeout=PATIENCE)
    assert wrong.status_code == 400 and "'truncate' must be true or false" in wrong.text


def test_paths_that_are_not_built_answer_501(client: ollama.Client, gateway: GatewayThread) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.push("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
    )
    for call in calls:
        with pytest.raises(ollama.ResponseError, match="is not supported by mlxpool") as caught:
            call()
        assert caught.value.status_code == 501
    assert httpx.get(f"{gateway.url}/api/version", timeout=PATIENCE).json() == {
        "version": version("mlxpool")
    }
    assert httpx.get(gateway.url, timeout=PATIENCE).status_code == 200


def test_curl_needs_no_content_type_and_no_page_in_a_browser_may_ask(
    gateway: GatewayThread,
) -> None:
    body = '{"model": "counting", "prompt": "x", "stream": false, "options": {"num_predict": 1}}'
    headers = {"content-type": "application/x-www-form-urlencoded"}
    url = f"{gateway.url}/api/generate"
    assert httpx.post(url, content=body, headers=headers, timeout=PATIENCE).status_code == 200
    headers["origin"] = "http://elsewhere"
    assert httpx.post(url, content=body, headers=headers, timeout=PATIENCE).status_code == 403


# ---- loading and unloading -----------------------------------------------------------------------


def loaded(client: ollama.Client, name: str) -> Any:
    """Returns the entry of a model in ps; None if it is not loaded."""
    return next((model for model in client.ps().models if model.model == name), None)


def seconds_left(client: ollama.Client, name: str) -> float:
    """Returns the seconds until a model is unloaded, according to Ollama's ps."""
    entry = loaded(client, name)
    assert entry is not None and entry.expires_at is not None
    return float((entry.expires_at - datetime.now(UTC)).total_seconds())


@pytest.mark.parametrize(
    ("keep_alive", "low", "high"),
    [
        (3600, 3500, 3600),
        ("1h30m", 5300, 5400),
        (-1, 10**9, 10**11),
    ],
)
def test_keep_alive_sets_how_long_a_model_stays(
    client: ollama.Client, keep_alive: float | str, low: float, high: float
) -> None:
    options = {"num_predict": 1}
    client.generate("bare", "x", raw=True, options=options, keep_alive=keep_alive)
    assert low < seconds_left(client, "bare") <= high
    client.generate("bare", "x", raw=True, options=options)
    assert low < seconds_left(client, "bare") <= high, "it holds for requests without one"


def test_an_empty_request_with_keep_alive_0_unloads(client: ollama.Client) -> None:
    for call in (client.generate, client.chat):
        assert call("thinker", keep_alive="10m").done_reason == "load"
        assert 500 < seconds_left(client, "thinker") <= 600
        assert call("thinker", keep_alive=0).done_reason == "unload"
        until(lambda: loaded(client, "thinker") is None, "it is unloaded")
        assert call("thinker", keep_alive=0).done_reason == "unload", "it loads nothing"
        assert loaded(client, "thinker") is None
    assert next(iter(client.chat("thinker", stream=True, keep_alive=0))).done_reason == "unload"


def test_keep_alive_0_unloads_after_the_answer(client: ollama.Client) -> None:
    answer = client.generate(
        "bare", "x", raw=True, options={"num_predict": 3, "seed": 7}, keep_alive=0, stream=True
    )
    assert list(answer)[-1].eval_count == 3
    until(lambda: loaded(client, "bare") is None, "it is unloaded")
    client.embed("demo-embed", "x", keep_alive=0)
    until(lambda: loaded(client, "demo-embed") is None, "it is unloaded")
    client.embed("demo-embed", "x", keep_alive="1h")
    assert 3500 < seconds_left(client, "demo-embed") <= 3600


def test_what_the_settings_pin_is_not_unloaded(tmp_path: Path) -> None:
    with (
        Pool(tmp_path, "[models.counting]\npath = 'builtin:counting'\npin = true") as pool,
        GatewayThread(pool.run_dir) as gateway,
        ollama.Client(host=gateway.url) as client,
    ):
        client.generate("counting", "x", options={"num_predict": 1}, keep_alive=0)
        with pytest.raises(ollama.ResponseError, match="its settings keep it for ever") as caught:
            client.generate("counting", keep_alive=0)
        assert caught.value.status_code == 400
        assert seconds_left(client, "counting") > 10**9


def test_options_of_ollamas_own_loader_are_logged_once(
    client: ollama.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    options = {"num_predict": 1, "num_thread": 3, "num_gpu": 99, "use_mmap": False, "seed": 7}
    options["bogus"] = 1
    for _ in range(2):
        answer = client.generate("counting", "x", options=options)
        assert answer.response == text_of(expected_ids("user: x\n", 7, 1))
    for _ in range(2):
        more = {"num_thread": 3, "num_batch": 8, "num_ctx": 20, "x" * 99: 1}
        client.embed("demo-embed", "x", options=more)
    logged = [vars(record)["thing"] for record in caplog.records if "no effect" in record.message]
    loader = ["num_batch", "num_ctx of vectors", "num_gpu", "num_thread", "use_mmap"]
    assert sorted(logged) == ["'bogus'", "'" + "x" * 56 + "...", *loader]


def test_fields_that_ollama_ignores_are_accepted_and_logged_once(
    gateway: GatewayThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    more = {"bogus_field": {"a": 1}, "draft": True, "unset": None}
    options = {"num_predict": 1, "seed": -5, "top_k": -1}
    asked: dict[str, dict[str, Any]] = {
        "/api/generate": {"prompt": "x", "options": options},
        "/api/chat": {"messages": HI, "options": options},
        "/api/embed": {"model": "demo-embed", "input": "x"},
        "/api/embeddings": {"model": "demo-embed", "prompt": "x"},
        "/api/show": {},
        "/api/pull": {},
    }
    for path, body in asked.items():
        whole = {"model": "counting", "stream": False, **body, **more}
        answer = httpx.post(f"{gateway.url}{path}", json=whole, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
    logged = [vars(record)["thing"] for record in caplog.records if "no effect" in record.message]
    fields = [f"'{name}' beside options" for name in ("bogus_field", "draft")]
    assert (
        sorted(thing for thing in logged if "beside" in thing and "stream" not in thing) == fields
    )
    misplaced = httpx.post(
        f"{gateway.url}/api/generate",
        json={"model": "counting", "prompt": "x", "temperature": 0},
        timeout=PATIENCE,
    )
    assert misplaced.status_code == 400 and "options.temperature" in misplaced.json()["error"]


def test_a_context_above_the_models_own_is_the_models_own(
    client: ollama.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    client.generate("counting", "x", options={"num_predict": 1, "num_ctx": 10**6})
    assert "num_ctx" in [vars(record).get("thing") for record in caplog.records]


# ---- models --------------------------------------------------------------------------------------


def test_pull_of_a_model_that_is_there_succeeds(client: ollama.Client) -> None:
    assert client.pull("bare").status == "success"
    statuses = list(client.pull("bare:latest", stream=True))
    assert [status.status for status in statuses if status.digest is None] == [
        "pulling manifest", "verifying sha256 digest", "writing manifest", "success",
    ]  # fmt: skip
    (layer,) = [status for status in statuses if status.digest is not None]
    assert layer.digest is not None and len(layer.digest) == len("sha256:") + 64
    assert layer.completed == layer.total and layer.total


@pytest.mark.parametrize("stream", [False, True])
def test_pull_of_another_model_says_how_to_get_it(client: ollama.Client, stream: bool) -> None:
    with pytest.raises(ollama.ResponseError, match=r"no model .llama3\.2.*mlxpool serve") as caught:
        list(client.pull("llama3.2", stream=stream))  # type: ignore[call-overload]
    assert caught.value.status_code == 404


def test_pull_of_a_long_name_shortens_it(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="--model NAME=FOLDER") as caught:
        client.pull("x" * 5000)
    assert len(caught.value.error) < 1000


def test_tags_and_show_are_complete(client: ollama.Client) -> None:
    until(lambda: info(client, "thinker"), "the model was looked at")
    tag = next(model for model in client.list().models if model.model == "thinker")
    shown = client.show("thinker")
    for entry in (tag, shown):
        details = entry.details
        assert details is not None and (details.family, details.families) == ("llama", ["llama"])
        assert details.format == "safetensors" and details.quantization_level == "F32"
        assert details.parameter_size and details.parameter_size.endswith("K")
        assert entry.modified_at is not None
        assert abs((entry.modified_at - datetime.now(UTC)).total_seconds()) < 3600
    assert tag.digest and len(tag.digest) == 12
    assert shown.template == TEMPLATE and shown.modelfile and shown.license == "MIT License"
    assert (shown.parameters or "").split() == ["temperature", "0.6"]
    fields = info(client, "thinker")
    assert fields["general.parameter_count"] > 10_000
    assert (fields["llama.block_count"], fields["llama.embedding_length"]) == (2, 32)
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (4, 2)
    empty = client.show("counting")
    assert empty.template == "" and empty.modified_at is not None


def test_a_verbose_show_has_more(gateway: GatewayThread) -> None:
    body = {"name": "counting", "verbose": True}  # `name` is the older form of `model`
    shown = httpx.post(f"{gateway.url}/api/show", json=body, timeout=PATIENCE).json()
    assert shown["model_info"]["mlxpool.tokenizer"] == "bytes"


# ---- context -------------------------------------------------------------------------------------


def test_context_continues_a_conversation(client: ollama.Client) -> None:
    options = {"num_predict": 3, "seed": 7}
    first = client.generate("counting", "hi", options=options)
    ids = [*b"user: hi\n", *expected_ids("user: hi\n", 7, 3)]
    assert first.context == ids
    second = client.generate("counting", "more", options=options, context=first.context)
    prompt = [*ids, *b"user: more\n"]
    tokens = [token_at(prompt, 7, place, 50_000) for place in range(3)]
    assert second.response == text_of(tokens) and second.context == [*prompt, *tokens]
    assert second.prompt_eval_count == len(prompt)
    streamed = list(client.generate("counting", "hi", options=options, stream=True))
    assert [part.context for part in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].context == ids


def test_context_of_a_model_without_a_template_and_of_raw(client: ollama.Client) -> None:
    until(lambda: info(client, "bare"), "the model was looked at")
    options = {"num_predict": 2, "seed": 7}  # the answer does not end earlier with this seed
    first = client.generate("bare", "hello", options=options)
    assert first.context is not None and len(first.context) == 5 + 2
    second = client.generate("bare", "again", options=options, context=first.context)
    assert second.prompt_eval_count == len(first.context) + 5
    assert client.generate("bare", "hello", raw=True, options=options).context is None


def test_context_keeps_thoughts_apart(client: ollama.Client) -> None:
    until(lambda: info(client, "thinker"), "the model was looked at")
    options = {"num_predict": 4, "seed": 3}
    first = client.generate("thinker", "hi", options=options)
    assert first.thinking and not first.response and first.context
    for think, thinks in ((None, True), (False, False)):
        again = client.generate(
            "thinker", "hi", options=options, context=first.context, think=think
        )
        assert bool(again.thinking) is thinks and bool(again.response) is not thinks


# ---- the client as programs use it ---------------------------------------------------------------


def test_a_history_of_the_clients_own_messages(client: ollama.Client) -> None:
    history: list[Any] = [{"role": "system", "content": "Be short."}, HI[0]]
    options = {"num_predict": 4, "seed": 7}
    history += [client.chat("counting", history, options=options).message, HI[0]]
    prompt = "system: Be short.\nuser: hi\n"
    assert history[2].content == text_of(expected_ids(prompt, 7, 4))
    prompt += f"assistant: {history[2].content}\nuser: hi\n"
    said = client.chat("counting", history, options=options).message.content
    assert said == text_of(expected_ids(prompt, 7, 4))


def bearing(city: str) -> str:
    """Tells in which direction a city lies.

    Args:
        city: The name of the city.
    """
    return f"{city}: 90"


def test_python_functions_as_tools(client: ollama.Client) -> None:
    assert client.chat("demo-chat", HI, tools=[bearing], options={"num_predict": 1}).done
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        client.chat("counting", HI, tools=[bearing])


def test_several_requests_of_the_asynchronous_client_at_once(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", gateway.url)

    async def story() -> list[Any]:
        async with ollama.AsyncClient() as client:
            options = {"num_predict": 4, "seed": 7}
            asked = (client.chat("counting", HI, options=options) for _ in range(4))
            return [answer.message.content for answer in await asyncio.gather(*asked)]

    assert asyncio.run(story()) == [text_of(expected_ids(LINE, 7, 4))] * 4
