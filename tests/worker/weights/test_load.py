"""Tests model folders: the properties read from a good folder, and the error of each bad folder.

Most tests need no MLX.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import models
from mlxpool.worker.layers.quantisation import parse_quant_config
from mlxpool.worker.weights.files import folder_files, merge_tensors
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from mlxpool.worker.weights.match import mismatches
from support.worker_checkpoints import (
    EOS,
    config,
    random_weights,
    refusal,
    write_checkpoint,
    write_json,
    write_safetensors,
    write_weights,
)

EMBED = "model.embed_tokens.weight"
Change = Callable[[Path], object]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def test_inspect_describes_a_folder(good: Path) -> None:
    folder = inspect(good)
    assert (folder.model_type, folder.context, folder.eos_ids) == ("llama", 512, frozenset({EOS}))
    assert (folder.bos_token, folder.add_bos) == ("<s>", None)
    assert folder.tensors[EMBED].shape == (264, 32)
    assert folder.weight_bytes == sum(a.nbytes for a in random_weights(config()).values())


def test_inspect_imports_no_mlx(good: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mlxpool.worker.weights.inspect import inspect; "
        "from mlxpool.worker.prompt.tokenizer import ChatTokenizer; "
        "ChatTokenizer.from_folder(inspect(Path(sys.argv[1]))); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']"
    )
    subprocess.run([sys.executable, "-c", code, str(good)], check=True)


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    single, many = write_checkpoint(tmp_path / "1"), write_checkpoint(tmp_path / "3", shards=3)
    assert len(inspect(many).shards) == 3
    assert inspect(many).weight_bytes == inspect(single).weight_bytes


def test_the_digest_depends_on_content_only(good: Path, tmp_path: Path) -> None:
    digest = inspect(good).digest
    copy = shutil.copytree(good, tmp_path / "copy", copy_function=shutil.copy)
    assert inspect(copy).digest == digest
    write_json(copy / "tokenizer_config.json", {"bos_token": "<s>"})
    assert inspect(copy).digest != digest
    assert inspect(write_checkpoint(tmp_path / "other", seed=1)).digest != digest


def test_paths_that_are_no_folder_of_a_model(tmp_path: Path) -> None:
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere")
    assert "no config.json: name the folder of a Hugging Face model" in refusal(tmp_path)
    (tmp_path / "notes").write_text("hello")
    assert "is a file: name the folder" in refusal(tmp_path / "notes")


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def as_integers(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))


def in_two_shards(folder: Path) -> None:
    rename(folder, "model.safetensors", "model-1.safetensors")
    write_safetensors(folder / "model-2.safetensors", {EMBED: np.zeros((264, 32), np.float32)})


def layers(count: int) -> Change:
    return lambda folder: write_json(folder / "config.json", config(num_hidden_layers=count))


BAD: dict[str, tuple[Change, str]] = {  # the change of a good folder, and words of the error
    "broken config": (lambda m: (m / "config.json").write_text("{"), "config.json is not JSON"),
    "a list": (lambda m: (m / "config.json").write_text("[]"), "holds a list, must be a map"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer.json"),
    "GGUF": (
        lambda m: (m / "model.safetensors").write_bytes(b"GGUF\3\0\0\0"),
        "GGUF file under another name",
    ),
    "3 layers": (layers(3), "and 6 more"),
    "5 layers": (layers(5), "asks for: it describes 5 layers, the weights have 2"),
    "1 layer": (
        layers(1),
        "unknown to the model that config.json describes: it describes 1 layers",
    ),
    "integers": (as_integers, "has dtype I32, must be one of F32, F16, BF16"),
    "a tensor in two shards": (in_two_shards, f"tensor '{EMBED}' is in both"),
    "PyTorch": (
        lambda m: rename(m, "model.safetensors", "pytorch_model.bin"),
        "no model*.safetensors; it has PyTorch files",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_is_not_read(good: Path, case: str) -> None:
    change, words = BAD[case]
    change(good)
    assert words in refusal(good)


@pytest.mark.parametrize("model_type", ["unheard_of", None, 3])
def test_an_unsupported_architecture(good: Path, model_type: Any) -> None:
    write_json(good / "config.json", config() | {"model_type": model_type})
    assert f"model_type {model_type!r}" in refusal(good)
    assert f"supported are: {', '.join(models.SUPPORTED)}" in refusal(good)


@pytest.mark.parametrize("kind", ["model", "tensor"])
def test_an_ollama_manifest(tmp_path: Path, kind: str) -> None:
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "llama3" / "8b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": "sha256:abc", "size": 4}
    write_json(manifest, {"layers": [layer]})
    words = "name the model instead, as ollama:registry.ollama.ai/library/llama3:8b"
    assert words in refusal(manifest)


def test_weights_that_do_not_fit_the_config(good: Path) -> None:
    """The folder's error is the first mismatch; `mismatches` yields all mismatches."""
    weights = random_weights(config())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    write_weights(good, weights)
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in inspect(good).tensors
    del weights["lm_head.weight"]
    weights[EMBED] = np.zeros((8, 32), np.float32)
    weights["model.extra"] = np.zeros(2, np.float32)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.uint8)
    write_weights(good, weights)
    tensors = merge_tensors(folder_files(good).contents())
    said = list(mismatches(models.plan(config()), tensors, parse_quant_config({})))
    assert said[0] == refusal(good)
    expected = (
        "lack the tensor 'lm_head.weight'",
        "has the tensor 'model.extra', unknown to the model",
        f"'{EMBED}' has shape [8, 32], config.json asks for [264, 32]",
        "dtype U8",
    )
    for words, fault in zip(expected, said, strict=True):
        assert words in fault


def test_an_index_that_names_missing_shards(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    assert "names the shard 'model-00002-of-00002.safetensors', which is missing" in refusal(path)
    write_json(path / "model.safetensors.index.json", {"weight_map": {"w": "../../etc/passwd"}})
    assert "must be a plain file name" in refusal(path)
    write_json(path / "model.safetensors.index.json", {})
    assert "has no weight_map" in refusal(path)


def test_load_reads_stored_weights_and_reports_progress(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")
    folder = inspect(write_checkpoint(tmp_path, shards=2))
    seen: list[tuple[int, int]] = []
    loaded = load(folder, lambda tensors, size: seen.append((tensors, size)))
    assert seen[-1] == (len(folder.tensors), folder.weight_bytes)
    assert len(seen) == 5  # embedding, two layers, norm, head
    assert loaded.weight_bytes == folder.weight_bytes
    weights = random_weights(config())
    embed = loaded.model.embed.weight  # type: ignore[attr-defined]
    assert np.array_equal(np.array(embed), weights[EMBED])


def test_float16_becomes_float32_on_the_cpu(good: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")
    write_json(good / "config.json", config())
    weights = {
        name: mx.array(w).astype(mx.bfloat16) for name, w in random_weights(config()).items()
    }
    mx.save_safetensors(str(good / "model.safetensors"), weights)
    loaded = load(inspect(good))
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert loaded.dtype == (mx.float32 if on_cpu else mx.bfloat16)


def test_weights_that_change_before_they_are_read(good: Path) -> None:
    pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")
    folder = inspect(good)
    write_weights(good, random_weights(config(vocab_size=300)))
    with pytest.raises(ModelLoadFailed, match="changed while it was read"):
        load(folder)
    (good / "model.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match="cannot be read"):
        load(folder)
