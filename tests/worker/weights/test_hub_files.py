"""The choice of a repository's files to download."""

from __future__ import annotations

import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.hub_cache import HubModel
from mlxpool.worker.weights.hub_files import needed_files

NAME = "org/name"
TEXT = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
PARTS = [f"Q8/x-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]


def needed(names: list[str], indexed: set[str] | None = None, file: str = "") -> list[str]:
    return needed_files(HubModel(NAME, file), names, indexed or set())


def refusal(names: list[str], indexed: set[str] | None = None, file: str = "") -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        needed(names, indexed, file)
    return str(caught.value)


def test_all_that_a_folder_is_read_from() -> None:
    files = [
        *TEXT,
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "LICENSE.txt",
        "README.md",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
        "modules.json",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.model",
    ]
    assert needed(files) == sorted(files)


@pytest.mark.parametrize(
    "other",
    [
        ".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.onnx",
        "onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin", "picture.png",
        "original/params.json", "original/consolidated.00.pth", "consolidated.safetensors",
        "adapter_model.safetensors", "model-00001-of-00002.safetensors", "model.fp16.safetensors",
        "tf_model.h5", "x-Q4_0.gguf", "modeling_x.py", "runs/config.json",
        "checkpoint-1/model.safetensors",
    ],
)  # fmt: skip
def test_what_a_model_is_not_read_from_is_left_out(other: str) -> None:
    wanted = sorted([*TEXT, "model.safetensors"])
    assert needed([*wanted, other]) == wanted


def test_shards_are_those_that_the_index_names() -> None:
    index = "model.safetensors.index.json"
    names = [*TEXT, index, *SHARDS, "model.safetensors", "extra.safetensors"]
    assert needed(names, set(SHARDS)) == sorted([*TEXT, index, *SHARDS])
    assert needed([*TEXT, *SHARDS]) == sorted([*TEXT, *SHARDS])
    assert "lacks the file 'lost.safetensors' of its weights" in refusal(
        names, {*SHARDS, "lost.safetensors"}
    )


def test_a_gguf_file_is_all_that_its_model_needs() -> None:
    names = ["README.md", "config.json", "x-Q4_0.gguf", "mmproj-f16.gguf", ".gitattributes"]
    assert needed(names) == ["x-Q4_0.gguf"]
    assert needed([*names, *PARTS], file="x-Q4_0.gguf") == ["x-Q4_0.gguf"]


@pytest.mark.parametrize("part", PARTS)
def test_a_split_gguf_model_needs_all_its_parts(part: str) -> None:
    assert needed(["config.json", *PARTS]) == PARTS
    assert needed([*PARTS, "x-Q4_0.gguf"], file=part) == PARTS
    assert "lacks the file" in refusal([part], file=part)


def test_of_several_gguf_models_one_has_to_be_named() -> None:
    names = ["x-Q4_0.gguf", *PARTS, "mmproj-f16.gguf"]
    words = f"has 2 GGUF models, name one as {NAME}:FILE: {PARTS[0]}, x-Q4_0.gguf"
    assert words in refusal(names)
    words = f"has no file y.gguf; its GGUF models are: {PARTS[0]}, x-Q4_0.gguf"
    assert words in refusal(names, file="y.gguf")
    assert "its GGUF models are: none" in refusal(TEXT, file="y.gguf")


def test_a_repository_without_weights_that_are_read() -> None:
    assert "has weights of PyTorch alone" in refusal([*TEXT, "pytorch_model.bin"])
    assert "neither a config.json with safetensors nor GGUF files" in refusal(["README.md"])
    assert "neither a config.json" in refusal(["model.safetensors"])
