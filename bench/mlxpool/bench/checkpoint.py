"""Writes a model folder with random weights in the shape of a known model, for all contestants."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxpool.bench import tensors
from mlxpool.bench.shapes import SHAPES

MAX_SHARD_BYTES = 2 * 1024**3  # most bytes of weights in one file
SPECIAL_TOKENS = ("<s>", "</s>")
BYTE_TOKENS = 256


def write(
    folder: Path,
    shape: str,
    *,
    layers: int = 0,
    vocabulary: int = 0,
    quantise: str = "",
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes a model folder and returns its path.

    `layers` and `vocabulary` replace the numbers of the shape unless they are 0. `quantise` is a
    quantisation mode; "" means none. Raises ValueError for an unknown shape or mode.
    """
    config = config_of(shape, layers, quantise)
    config["vocab_size"] = vocabulary or config["vocab_size"]
    write_settings(folder, config, dtype)
    _write_weights(folder, config, dtype, max_shard_bytes)
    return folder


def write_settings(folder: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Writes all files of a model folder except the weights. `dtype`: the type of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    last = config["vocab_size"] - 1
    _write_json(folder / "generation_config.json", {"bos_token_id": last - 1, "eos_token_id": last})
    _write_tokenizer(folder, config["vocab_size"])


def config_of(shape: str, layers: int = 0, quantise: str = "") -> dict[str, Any]:
    """Returns the config.json of a shape. Raises ValueError for an unknown shape or mode."""
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}; there are {', '.join(SHAPES)}")
    config = dict(SHAPES[shape])
    if layers:
        config["num_hidden_layers"] = layers
    if quantise:
        setting = tensors.quantisation_of(config, quantise)
        config["quantization"] = config["quantization_config"] = setting
    return config


def _write_weights(
    folder: Path, config: Mapping[str, Any], dtype: str, max_shard_bytes: int
) -> None:
    import mlx.core as mx

    files: list[dict[str, Any]] = [{}]
    free = max_shard_bytes
    for name, array in _weights(config, getattr(mx, dtype)):
        mx.eval(array)
        if free < array.nbytes and files[-1]:
            _save(folder, files)
            files.append({})
            free = max_shard_bytes
        files[-1][name] = array
        free -= array.nbytes
    _save(folder, files)
    index = {name: file_name(number) for number, file in enumerate(files) for name in file}
    write_index(folder, index)


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the index of a folder: the file of each tensor."""
    _write_json(folder / "model.safetensors.index.json", {"weight_map": files})


def _weights(config: Mapping[str, Any], dtype: Any) -> Iterator[tuple[str, Any]]:
    """Yields the names and arrays of the tensors, as in a folder that mlx-lm converted."""
    import mlx.core as mx

    mx.random.seed(0)
    for tensor in tensors.planned(config):
        noise = mx.random.normal(tensor.shape, dtype=dtype) * (tensor.shape[-1] ** -0.5)
        layout = tensor.layout
        if "norm" in tensor.name:
            yield tensor.name, 1 + noise / 10
        elif tensor.name.endswith(tensors.CORRECTION):
            yield tensor.name, mx.zeros_like(noise)
        elif layout is not None:
            module = tensor.name.removesuffix(".weight")
            parts = mx.quantize(noise, layout.group_size, layout.bits, layout.mode)
            for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
                yield f"{module}.{part}", array
        else:
            yield tensor.name, noise


def _save(folder: Path, files: list[dict[str, Any]]) -> None:
    """Writes the tensors in the last map of `files` (name -> array), and frees the arrays."""
    import mlx.core as mx

    names = dict.fromkeys(files[-1])
    mx.save_safetensors(str(folder / file_name(len(files) - 1)), files[-1])
    files[-1] = names
    mx.clear_cache()


def file_name(number: int) -> str:
    """Returns the name of the weights file with this number, counted from 0."""
    return f"model-{number + 1:05}.safetensors"


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes a tokenizer whose vocabulary is 256 bytes, invented words and two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [_word(number) for number in range(vocabulary - BYTE_TOKENS - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer(BPE({text: i for i, text in enumerate([*chars, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _word(number: int) -> str:
    """Returns a space and letters in byte-level form; a different word for each number."""
    letters = ""
    while True:
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
        if not number:
            return f"Ġ{letters}-"


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
