"""The embedded model is complete, small, consistent and as good as its model card states.

Needs no MLX.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import mlxpool.worker.compute.model_source

DEMO = Path(mlxpool.worker.compute.model_source.__file__).parents[1] / "demo"
FILES = {
    "LICENSE-PSF.txt",
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}
HEAD_FILES = {"model.safetensors.index.json", "mtp.safetensors", "mtp_training.json"}
END = "<|endoftext|>"


def read(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((DEMO / name).read_text(encoding="utf-8"))
    return value


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Returns the weight shapes of a Llama with these sizes and tied embeddings."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    shapes = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = [config["vocab_size"], hidden]
    shapes["model.norm.weight"] = [hidden]
    return shapes


def test_the_folder_is_complete_and_at_most_8_mb_and_2_more_for_its_head() -> None:
    sizes = {file.name: file.stat().st_size for file in DEMO.iterdir()}
    assert set(sizes) == FILES | HEAD_FILES
    assert sum(sizes[file] for file in FILES) <= 8_000_000
    assert sum(sizes[file] for file in HEAD_FILES) <= 2_000_000


def test_the_weights_are_those_that_the_config_describes() -> None:
    raw = (DEMO / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt"
    shapes = expected_shapes(read("config.json"))
    assert {name: tensor["shape"] for name, tensor in header.items()} == shapes
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    parameters = sum(map(prod, shapes.values()))
    assert parameters == read("training.json")["parameters"]
    assert len(raw) == 8 + length + 2 * parameters


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x.append(1, 'a')\n\n\nclass A:\n\tpass\n",
        "naïve — 日本語 🙂 \u0000\ufeff\r\n",
        "  two  spaces, one trailing ",
        "",
    ],
)
def test_decoding_returns_the_encoded_text(tokenizer: Tokenizer, text: str) -> None:
    encoding = tokenizer.encode(text)
    assert encoding.tokens[:1] == [END]
    assert tokenizer.decode(encoding.ids) == text


def test_the_tokenizer_agrees_with_the_config(tokenizer: Tokenizer) -> None:
    config = read("config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    end = tokenizer.token_to_id(END)
    for settings in (config, read("generation_config.json")):
        assert settings["bos_token_id"] == settings["eos_token_id"] == end


def test_the_chat_template_writes_user_messages_as_comments() -> None:
    settings = read("tokenizer_config.json")
    template = ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    messages = [
        {"role": "user", "content": "Add two numbers.\nReturn the sum."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
        {"role": "user", "content": "Now subtract."},
    ]
    assert template.render(messages=messages, bos_token=settings["bos_token"]) == (
        f"{END}# Add two numbers.\n# Return the sum.\n"
        "def add(a, b):\n    return a + b\n"
        "# Now subtract.\n"
    )


def test_the_model_compresses_better_than_xz() -> None:
    figures = read("training.json")
    bits = figures["bits_per_byte"]
    assert 0 < bits < figures["xz_after_source_bits_per_byte"] < figures["xz_bits_per_byte"]
    assert len(figures["bits_per_byte_by_module"]) >= 20
