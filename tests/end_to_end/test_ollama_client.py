"""Every method of Ollama's own Python client, as programs use it: with no change but the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ollama
import pytest
from ollama import AsyncClient, Client, Options, ResponseError

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.pool import Pool, until
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %};{% endfor %}"
    "{% if enable_thinking is false %}{% else %}<think>\n{% endif %}"
)
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
QUESTION = {"role": "user", "content": "Which way is north?"}
SHORT: Mapping[str, Any] = {"num_predict": 4, "seed": 7}
ANSWER = text_of(expected_ids("user: Which way is north?\n", 7, 4))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    path = write_checkpoint(
        tmp_path_factory.mktemp("models") / "thinker", tokenizer_config={"chat_template": TEMPLATE}
    )
    config = f'[models.thinker]\npath = "{path}"\n'
    with Pool(tmp_path_factory.mktemp("pool"), config) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(pool: Pool) -> Iterator[GatewayThread]:
    with GatewayThread(pool.run_dir) as running:
        yield running


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[Client]:
    with Client(host=gateway.url) as made:
        until(lambda: "thinking" in (made.show("thinker").capabilities or []), "it was looked at")
        yield made


# ---- generate ------------------------------------------------------------------------------------


def test_generate(client: Client) -> None:
    answer = client.generate(model="counting", prompt=QUESTION["content"], options=SHORT)
    assert answer["response"] == answer.response == ANSWER
    assert answer.done and answer.eval_count == 4 and answer.context


def test_generate_in_a_stream_with_options_of_the_clients_own_type(client: Client) -> None:
    options = Options(num_predict=4, seed=7, num_thread=2, num_gpu=1, use_mmap=True)
    parts = client.generate("counting", QUESTION["content"], stream=True, options=options)
    assert "".join(part["response"] for part in parts) == ANSWER


def test_generate_with_log_probabilities(client: Client) -> None:
    answer = client.generate("thinker", "x", options=SHORT, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None and len(answer.logprobs) == answer.eval_count
    best = answer.logprobs[0].top_logprobs
    assert best is not None and len(best) == 2


def test_generate_with_thoughts(client: Client) -> None:
    answer = client.generate("thinker", "x", think=True, options=SHORT)
    assert answer.thinking and not answer.response
    plain = client.generate("thinker", "x", think=False, options=SHORT)
    assert plain.response and not plain.thinking
    for level in ("low", "medium", "high"):
        assert client.generate("thinker", "x", think=level, options=SHORT).thinking


# ---- chat ----------------------------------------------------------------------------------------


def test_chat(client: Client) -> None:
    answer = client.chat(model="counting", messages=[QUESTION], options=SHORT)
    assert answer["message"]["content"] == answer.message.content == ANSWER
    assert answer.message.role == "assistant"


def test_chat_in_a_stream(client: Client) -> None:
    parts = client.chat("counting", [QUESTION], stream=True, options=SHORT)
    assert "".join(part.message.content or "" for part in parts) == ANSWER


def test_chat_with_a_history(client: Client) -> None:
    history: list[Any] = [{"role": "system", "content": "Be short."}]
    for _ in range(2):
        history.append(QUESTION)
        history.append(client.chat("counting", history, options=SHORT).message)
    prompt = "system: Be short.\nuser: Which way is north?\n"
    first = text_of(expected_ids(prompt, 7, 4))
    assert history[2].content == first
    prompt += f"assistant: {first}\nuser: Which way is north?\n"
    assert history[4].content == text_of(expected_ids(prompt, 7, 4))


def test_chat_with_thoughts(client: Client) -> None:
    answer = client.chat("thinker", [QUESTION], think=True, options=SHORT)
    assert answer.message.thinking and not answer.message.content
    again = client.chat("thinker", [QUESTION, answer.message, QUESTION], options=SHORT)
    assert again.done


def bearing(city: str, degrees: int = 0) -> str:
    """Tells in which direction a city lies.

    Args:
        city: The name of the city.
        degrees: What to add to the direction.
    """
    return f"{city}: {90 + degrees}"


def test_chat_with_python_functions_as_tools(client: Client) -> None:
    asked = client.chat("thinker", [QUESTION], tools=[bearing], options=SHORT)
    assert asked.done and not asked.message.tool_calls, "random weights call nothing"
    call = {"function": {"name": "bearing", "arguments": {"city": "Oslo"}}}
    called: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": bearing("Oslo"), "tool_name": "bearing"},
    ]
    answer = client.chat("thinker", called, tools=[bearing], options=SHORT)
    assert answer.prompt_eval_count and asked.prompt_eval_count
    assert answer.prompt_eval_count > asked.prompt_eval_count
    with pytest.raises(ResponseError, match="does not support tools"):
        client.chat("counting", [QUESTION], tools=[bearing])


# ---- several at once -----------------------------------------------------------------------------


def test_async_generate_chat_and_embed(gateway: GatewayThread) -> None:
    async def story() -> None:
        async with AsyncClient(host=gateway.url) as client:
            await use(client)

    async def use(client: AsyncClient) -> None:
        asked = (client.chat("counting", [QUESTION], options=SHORT) for _ in range(4))
        for answer in await asyncio.gather(*asked):
            assert answer.message.content == ANSWER
        text = ""
        async for part in await client.generate(
            "counting", QUESTION["content"], stream=True, options=SHORT
        ):
            text += part.response or ""
        assert text == ANSWER
        assert len((await client.embed("demo-embed", ["a", "b"])).embeddings) == 2
        assert (await client.pull("demo")).status == "success"
        assert "demo" in [model.model for model in (await client.list()).models]

    asyncio.run(story())


def test_the_functions_of_the_module(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import ollama; ollama.chat(…)` with OLLAMA_HOST, as most programs have it."""
    monkeypatch.setenv("OLLAMA_HOST", gateway.url)
    with Client() as made:
        assert made.chat("counting", [QUESTION], options=SHORT).message.content == ANSWER


# ---- vectors -------------------------------------------------------------------------------------


def test_embed(client: Client) -> None:
    one = client.embed(model="demo-embed", input="def add(a, b):")
    batch = client.embed("demo-embed", ["def add(a, b):", "class Stack:"], truncate=True)
    assert len(one.embeddings) == 1 and len(batch.embeddings) == 2
    assert list(batch["embeddings"][0]) == pytest.approx(list(one["embeddings"][0]), abs=1e-4)
    assert len(client.embeddings("demo-embed", "x").embedding) == len(one.embeddings[0])
    short = client.embed("demo-embed", "x", options={"num_thread": 1}, keep_alive="10m")
    assert len(short.embeddings) == 1


# ---- models --------------------------------------------------------------------------------------


def test_list(client: Client) -> None:
    for model in client.list().models:
        assert model.model and model.digest and model.size is not None and model.modified_at
        assert model.details is not None and model.details.format == "safetensors"
        assert f"{model.size.real / 2**20:.2f}"


def test_ps(client: Client) -> None:
    client.generate("counting", keep_alive="1h")
    (model,) = [one for one in client.ps().models if one.model == "counting"]
    assert model.name == "counting" and model.digest and model.expires_at
    assert model.size is not None and model.size_vram is not None and model.context_length


def test_show(client: Client) -> None:
    shown = client.show("demo")
    until(lambda: (client.show("demo").modelinfo or {})["general.architecture"], "was looked at")
    shown = client.show("demo")
    assert shown.modified_at and shown.modelfile and shown.details and shown.capabilities
    assert shown.template is not None and shown.license is not None and shown.parameters is not None
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 2048


def test_pull(client: Client) -> None:
    """A progress bar for each layer, as programs draw it."""
    done: dict[str, int] = {}
    last = None
    for part in client.pull("demo", stream=True):
        last = part.status
        if part.digest and part.completed:
            done[part.digest] = done.get(part.digest, 0) + part.completed
    assert last == "success" and all(done.values())
    with pytest.raises(ResponseError, match=r"mlxpool serve --model llama3=") as caught:
        client.pull("llama3")
    assert caught.value.status_code == 404


def test_a_program_that_pulls_what_is_missing(client: Client) -> None:
    with pytest.raises(ResponseError) as caught:
        client.chat("counting2", [QUESTION])
    assert caught.value.status_code == 404 and "did you mean 'counting'?" in caught.value.error
    assert client.pull("counting").status == "success"


# ---- what is refused, by name --------------------------------------------------------------------

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"way": {"type": "string"}}}
REFUSED: dict[str, tuple[Callable[[Client], Any], int, str]] = {
    "images in a chat": (
        lambda client: client.chat("demo", [{**QUESTION, "images": [PNG]}]),
        400,
        "does not support image input",
    ),
    "images beside a prompt": (
        lambda client: client.generate("demo", "x", images=[PNG]),
        400,
        "does not support image input",
    ),
    "a form of the answer": (
        lambda client: client.chat("counting", [QUESTION], format=SCHEMA),
        400,
        "format is not supported: the counting model answers with numbers",
    ),
    "the middle of a text": (
        lambda client: client.generate("counting", "def add(", suffix="return c"),
        400,
        "suffix is not supported",
    ),
    "thoughts": (
        lambda client: client.chat("counting", [QUESTION], think=True),
        400,
        "does not support thinking",
    ),
    "create": (lambda client: client.create("mine", from_="demo"), 501, "/api/create is not"),
    "copy": (lambda client: client.copy("demo", "mine"), 501, "/api/copy is not supported"),
    "delete": (lambda client: client.delete("demo"), 501, "/api/delete is not supported"),
    "push": (lambda client: client.push("demo"), 501, "/api/push is not supported"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_named(client: Client, what: str) -> None:
    call, status, words = REFUSED[what]
    with pytest.raises(ollama.ResponseError, match=words) as caught:
        call(client)
    assert caught.value.status_code == status
