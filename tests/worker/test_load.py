"""Model folders: what a good one tells, and how each bad one is named. Most need no MLX."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_checkpoints import (
    BOS,
    EOS,
    config,
    random_weights,
    write_checkpoint,
    write_json,
    write_raw_safetensors,
    write_safetensors,
    write_weights,
)

from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.worker import headers
from mlxpool.worker.load import inspect, load
from mlxpool.worker.tokenizer import Text

EMBED = "model.embed_tokens.weight"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        inspect(path)
    return str(caught.value)


def test_inspect_tells_what_the_folder_holds(good: Path) -> None:
    folder = inspect(good)
    assert (folder.model_type, folder.context, folder.eos_ids) == ("llama", 512, {EOS})
    assert (folder.bos_token, folder.add_bos) == ("<s>", None)
    assert folder.tensors[EMBED].shape == (264, 32)
    assert folder.weight_bytes == sum(a.nbytes for a in random_weights(config()).values())


def test_inspect_imports_no_mlx(good: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mlxpool.worker.load import inspect; "
        "from mlxpool.worker.tokenizer import Text; Text.from_folder(inspect(Path(sys.argv[1]))); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']"
    )
    subprocess.run([sys.executable, "-c", code, str(good)], check=True)


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    one, many = write_checkpoint(tmp_path / "1"), write_checkpoint(tmp_path / "3", shards=3)
    assert len(inspect(many).shards) == 3
    assert inspect(many).weight_bytes == inspect(one).weight_bytes


def test_the_digest_is_of_the_content(good: Path, tmp_path: Path) -> None:
    digest = inspect(good).digest
    copy = shutil.copytree(good, tmp_path / "copy", copy_function=shutil.copy)
    assert inspect(copy).digest == digest
    write_json(copy / "tokenizer_config.json", {"bos_token": "<s>"})
    assert inspect(copy).digest != digest
    assert inspect(write_checkpoint(tmp_path / "other", seed=1)).digest != digest


@pytest.mark.parametrize(
    ("generation", "changes", "settings", "ids"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {}, {5, 6}),
        ({"eos_token_id": None}, {"eos_token_id": 7}, {}, {7}),
        (None, {"eos_token_id": [7]}, {}, {7}),
        (None, {}, {"eos_token": "</s>"}, {EOS}),
        (None, {}, {"eos_token": {"content": "a"}}, {ord("a")}),
        (None, {}, {"eos_token": None}, set()),
    ],
)
def test_the_first_source_of_eos_ids_wins(
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


@pytest.mark.parametrize("model_type", ["gpt2", None, 3])
def test_an_unsupported_architecture(good: Path, model_type: Any) -> None:
    write_json(good / "config.json", config() | {"model_type": model_type})
    assert f"model_type {model_type!r}" in refusal(good)
    assert "supported are: llama, mistral" in refusal(good)


def test_quantised_weights(good: Path) -> None:
    write_json(good / "config.json", config(quantization={"bits": 4, "group_size": 64}))
    assert "quantised weights are not read by this version" in refusal(good)


def test_no_tokenizer(good: Path) -> None:
    (good / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(good)


def test_gguf_by_content_and_by_name(tmp_path: Path, good: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "q4.gguf").write_bytes(b"")
    (good / "model.safetensors").write_bytes(b"GGUF\3\0\0\0")
    for path in (tmp_path / "model.bin", tmp_path / "folder", tmp_path / "folder" / "q4.gguf"):
        assert "this is a GGUF file: MLX workers load Hugging Face folders" in refusal(path)
        assert "mlx_lm.convert" in refusal(path)
    assert "GGUF file under another name" in refusal(good)
    (good / "model.safetensors").rename(good / "model.gguf")
    assert "model.gguf: this is a GGUF file" in refusal(good)


@pytest.mark.parametrize("stored", [True, False])
def test_an_ollama_manifest(tmp_path: Path, stored: bool) -> None:
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "llama3" / "latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc", "size": 4}
    write_json(manifest, {"schemaVersion": 2, "layers": [layer]})
    blob = tmp_path / "blobs" / "sha256-abc"
    if stored:
        blob.parent.mkdir()
        blob.write_bytes(b"GGUF")
    words = refusal(manifest)
    assert "this is an Ollama manifest" in words
    assert "a GGUF file: MLX workers load" in words
    assert (str(blob) in words) == stored


def test_an_ollama_manifest_of_tensors(tmp_path: Path) -> None:
    layer = {"mediaType": "application/vnd.ollama.image.tensor", "digest": "sha256:abc"}
    write_json(tmp_path / "latest", {"layers": [layer]})
    assert "Ollama manifest of single tensors" in refusal(tmp_path / "latest")


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{]", "the header is not JSON"),
    "not a map": (b"[]", "the header is a list"),
    "tensor is no map": (b'{"w": 3}', "tensor 'w' is described by 3"),
    "dtype": (json.dumps({"w": entry(dtype="F12")}).encode(), "'w' has dtype 'F12'"),
    "shape": (json.dumps({"w": entry(shape=[-1])}).encode(), r"'w' has shape [-1]"),
    "offsets": (json.dumps({"w": entry(offsets=[8, 0])}).encode(), "data_offsets [8, 0]"),
    "outside": (
        json.dumps({"w": entry(shape=[5], offsets=[0, 20])}).encode(),
        "'w' ends at byte 20 of the data, the file has 16",
    ),
    "span": (json.dumps({"w": entry(shape=[3])}).encode(), "has 8 bytes, its shape [3] of F32"),
    "overlap": (
        json.dumps({"v": entry(), "w": entry(offsets=[4, 12])}).encode(),
        "'v' and 'w' overlap: 0..8 and 4..12",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_bad_safetensors_header(good: Path, case: str) -> None:
    header, words = HEADERS[case]
    write_raw_safetensors(good / "model.safetensors", header, bytes(16))
    assert words in refusal(good)
    assert "model.safetensors" in refusal(good)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x01\0\0", "truncated: 3 bytes"),
        ((500).to_bytes(8, "little") + b"{}", "truncated: the header claims 500 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "at most 104857600"),
    ],
)
def test_a_safetensors_file_that_ends_early(good: Path, content: bytes, words: str) -> None:
    (good / "model.safetensors").write_bytes(content)
    assert words in refusal(good)


def test_a_truncated_download(good: Path) -> None:
    file = good / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated, download it again" in refusal(good)


def test_metadata_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "w": entry(), "e": entry(shape=[0], offsets=[8, 8])}
    write_raw_safetensors(tmp_path / "x", json.dumps(header).encode(), bytes(8))
    _, tensors = headers.read_header(tmp_path / "x")
    assert set(tensors) == {"w", "e"}


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


def test_integer_weights(good: Path) -> None:
    file = good / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    assert "has dtype I32, must be one of F32, F16, BF16" in refusal(good)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    assert "names the shard 'model-00002-of-00002.safetensors', which is missing" in refusal(path)
    write_json(path / "model.safetensors.index.json", {"weight_map": {"w": "../../etc/passwd"}})
    assert "must be a plain file name" in refusal(path)
    write_json(path / "model.safetensors.index.json", {})
    assert "has no weight_map" in refusal(path)


def test_a_tensor_in_two_shards(good: Path) -> None:
    write_safetensors(good / "model-2.safetensors", {EMBED: np.zeros((264, 32), np.float32)})
    assert f"tensor '{EMBED}' is in both" in refusal(good)


def test_no_weights(good: Path) -> None:
    (good / "model.safetensors").rename(good / "pytorch_model.bin")
    assert "no model*.safetensors; it has PyTorch files" in refusal(good)


def test_text_round_trip_and_template(good: Path) -> None:
    text = Text.from_folder(inspect(good))
    assert text.decode(text.encode("né<|user|>")) == "né<|user|>"
    assert text.encode("a</s>") == [ord("a"), EOS]
    assert text.render([{"role": "user", "content": "hi"}], 0.0) == "<|user|>hi<|assistant|>"
    assert (text.piece(EOS), text.piece(10**6)) == (b"</s>", b"")


def test_text_that_is_not_unicode(good: Path) -> None:
    with pytest.raises(BadRequest, match="not valid Unicode"):
        Text.from_folder(inspect(good)).encode("\ud800")


def test_a_broken_tokenizer(good: Path) -> None:
    (good / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json cannot be read"):
        Text.from_folder(inspect(good))


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_a_prompt_begins_with_bos_once(tmp_path: Path, processor: bool, add_bos: Any) -> None:
    path = write_checkpoint(tmp_path, tokenizer_config={"add_bos_token": add_bos})
    if processor:
        _add_post_processor(path)
    text = Text.from_folder(inspect(path))
    begins = add_bos if add_bos is not None else processor
    assert text.encode("a") == ([BOS, 97] if begins else [97])
    assert text.encode("<s>a") == [BOS, 97]
    assert text.encode("") == ([BOS] if begins else [])


def _add_post_processor(path: Path) -> None:
    raw = json.loads((path / "tokenizer.json").read_text())
    special = {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    write_json(path / "tokenizer.json", raw)


def test_load_reads_what_is_stored_and_reports_progress(tmp_path: Path) -> None:
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


def test_halves_become_float32_on_the_cpu(good: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")
    write_json(good / "config.json", config())
    weights = {name: mx.array(w).astype(mx.bfloat16) for name, w in random_weights(config()).items()}
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
