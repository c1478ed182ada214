"""Model folders: the facts of a good one, the error of each bad one. Most tests need no MLX."""

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
    write_checkpoint,
    write_json,
    write_safetensors,
    write_weights,
)

EMBED = "model.embed_tokens.weight"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        inspect(path)
    return str(caught.value)


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
    one, many = write_checkpoint(tmp_path / "1"), write_checkpoint(tmp_path / "3", shards=3)
    assert len(inspect(many).shards) == 3
    assert inspect(many).weight_bytes == inspect(one).weight_bytes


def test_the_digest_depends_on_content_only(good: Path, tmp_path: Path) -> None:
    digest = inspect(good).digest
    copy = shutil.copytree(good, tmp_path / "copy", copy_function=shutil.copy)
    assert inspect(copy).digest == digest
    write_json(copy / "tokenizer_config.json", {"bos_token": "<s>"})
    assert inspect(copy).digest != digest
    assert inspect(write_checkpoint(tmp_path / "other", seed=1)).digest != digest


@pytest.mark.parametrize(
    ("generation", "changes", "settings", "ids"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {}, {5, 6, EOS}),
        ({"eos_token_id": None}, {"eos_token_id": 7}, {}, {7, EOS}),
        (None, {"eos_token_id": [7]}, {"eos_token": None}, {7}),
        (None, {}, {"eos_token": "</s>"}, {EOS}),
        (None, {}, {"eos_token": {"content": "a"}}, {ord("a")}),
        (None, {}, {"eos_token": None}, set()),
    ],
)
def test_eos_ids_are_of_the_first_file_and_the_tokenizer(
    tmp_path: Path, generation: Any, changes: Any, settings: Any, ids: set[int]
) -> None:
    path = write_checkpoint(tmp_path, tokenizer_config=settings, **changes)
    (path / "generation_config.json").unlink()
    if generation is not None:
        write_json(path / "generation_config.json", generation)
    assert inspect(path).eos_ids == ids


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "no config.json: name the folder of a Hugging Face model" in refusal(tmp_path)


def test_some_other_file(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    assert "is a file: name the folder" in refusal(tmp_path / "notes")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "config.json is not JSON"), ("[]", "holds a list, must be a map")]
)
def test_a_broken_config(good: Path, text: str, words: str) -> None:
    (good / "config.json").write_text(text)
    assert words in refusal(good)


@pytest.mark.parametrize("model_type", ["unheard_of", None, 3])
def test_an_unsupported_architecture(good: Path, model_type: Any) -> None:
    write_json(good / "config.json", config() | {"model_type": model_type})
    assert f"model_type {model_type!r}" in refusal(good)
    assert f"supported are: {', '.join(models.SUPPORTED)}" in refusal(good)


def test_no_tokenizer(good: Path) -> None:
    (good / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(good)


def test_gguf_under_another_name(good: Path) -> None:
    (good / "model.safetensors").write_bytes(b"GGUF\3\0\0\0")
    assert "GGUF file under another name" in refusal(good)


def test_an_ollama_manifest_of_gguf(tmp_path: Path) -> None:
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "llama3" / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc", "size": 4}
    write_json(manifest, {"schemaVersion": 2, "layers": [layer]})
    assert "name the model instead, as ollama:registry.ollama.ai/library/llama3:latest" in (
        refusal(manifest)
    )


def test_an_ollama_manifest_of_tensors(tmp_path: Path) -> None:
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "llama3" / "8b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.tensor", "digest": "sha256:abc"}
    write_json(manifest, {"layers": [layer]})
    words = "name the model instead, as ollama:registry.ollama.ai/library/llama3:8b"
    assert words in refusal(manifest)


def _without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda weights: weights.__delitem__(name)


def _with(name: str, *shape: int) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda weights: weights.__setitem__(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("lm_head.weight"), "lack the tensor 'lm_head.weight'"),
        (_with("model.extra", 2), "has the tensor 'model.extra', unknown to the model"),
        (_with(EMBED, 8, 32), f"'{EMBED}' has shape [8, 32], config.json asks for [264, 32]"),
        (_with("model.layers.0.self_attn.rotary_emb.inv_freq", 4), ""),
    ],
)
def test_weights_that_do_not_fit_the_config(good: Path, change: Any, words: str) -> None:
    weights = random_weights(config())
    change(weights)
    write_weights(good, weights)
    if words:
        assert words in refusal(good)
    else:
        assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in inspect(good).tensors


def test_many_missing_tensors_are_counted(good: Path) -> None:
    write_json(good / "config.json", config(num_hidden_layers=3))
    assert "and 6 more" in refusal(good)


def test_a_layer_count_that_the_tensors_do_not_have(good: Path) -> None:
    write_json(good / "config.json", config(num_hidden_layers=5))
    assert "asks for: it describes 5 layers, the weights have 2" in refusal(good)
    write_json(good / "config.json", config(num_hidden_layers=1))
    assert "unknown to the model that config.json describes: it describes 1 layers" in refusal(good)


def test_all_mismatches_of_the_tensors_at_once(good: Path) -> None:
    weights = random_weights(config())
    for change in (_without("lm_head.weight"), _with(EMBED, 8, 32), _with("model.extra", 2)):
        change(weights)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.uint8)
    write_weights(good, weights)
    said = list(
        mismatches(
            models.plan(config()),
            merge_tensors(folder_files(good).contents()),
            parse_quant_config({}),
        )
    )
    assert len(said) == 4
    assert said[0] == refusal(good)
    for words, fault in zip(
        ("lack the tensor 'lm_head.weight'", "'model.extra'", "shape [8, 32]", "dtype U8"),
        said,
        strict=True,
    ):
        assert words in fault


def test_integer_weights(good: Path) -> None:
    file = good / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    assert "has dtype I32, must be one of F32, F16, BF16" in refusal(good)


def test_an_index_that_names_missing_shards(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    assert "names the shard 'model-00002-of-00002.safetensors', which is missing" in refusal(path)
    write_json(path / "model.safetensors.index.json", {"weight_map": {"w": "../../etc/passwd"}})
    assert "must be a plain file name" in refusal(path)
    write_json(path / "model.safetensors.index.json", {})
    assert "has no weight_map" in refusal(path)


def test_a_tensor_in_two_shards(good: Path) -> None:
    (good / "model.safetensors").rename(good / "model-1.safetensors")
    write_safetensors(good / "model-2.safetensors", {EMBED: np.zeros((264, 32), np.float32)})
    assert f"tensor '{EMBED}' is in both" in refusal(good)


def test_no_weights(good: Path) -> None:
    (good / "model.safetensors").rename(good / "pytorch_model.bin")
    assert "no model*.safetensors; it has PyTorch files" in refusal(good)


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
