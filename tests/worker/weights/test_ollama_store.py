"""Models in Ollama's store equal the folder they were made from, or errors name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import find_files
from support import worker_checkpoints
from support.prompts import chat_ids
from support.worker_checkpoints import config, random_weights, write_checkpoint
from support.worker_stores import JSON, TENSOR, Store

NAME = "small:1b"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "folder", shards=2, attention_bias=True)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    return Store(tmp_path / "store")


def opened(name: str = NAME) -> ModelFolder:
    return inspect(find_files(f"ollama:{name}"))


def refusal(name: str = NAME) -> str:
    return worker_checkpoints.refusal(f"ollama:{name}")


def quantised_layer(
    store: Store, metadata: dict[str, str], parts: list[tuple[str, str, list[int], int]]
) -> dict[str, Any]:
    """Stores a blob with the tensors of the layer UP, all zeros; returns the manifest's layer.

    `parts`: (name, dtype, shape, bytes of a number) of each tensor.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape, size in parts:
        begin, end = end, end + int(np.prod(shape)) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    blob = len(raw).to_bytes(8, "little") + raw + bytes(end)
    return store.layer(TENSOR, f"{UP}.weight", blob)


def test_a_stored_model_equals_its_folder(folder: Path, store: Store) -> None:
    manifest = store.write(NAME, store.layers(folder))
    there, here = opened(), inspect(folder)
    assert there.path == manifest
    assert there.match.weights == here.match.weights
    assert (there.context, there.eos_ids, there.bos_token) == (512, here.eos_ids, "<s>")
    text = ChatTokenizer.from_folder(there)
    asked = chat_ids(text, [{"role": "user", "content": "hi"}])
    assert text.decode(asked.ids) == "<|user|>hi<|assistant|>"
    assert "model.layers.0.self_attn.q_proj.bias" in there.tensors


def test_names_as_ollama_writes_them(folder: Path, store: Store) -> None:
    layers = store.layers(folder)
    for name in ("small:latest", NAME):
        store.write(name, layers)
    full = "registry.ollama.ai/library/small:1b"
    digests = {opened(name).digest for name in ("small", NAME, "library/small", full)}
    assert len(digests) == 1
    for bad in ("../small", "a/b/c/d", "small:../1b", "small:", ".hidden"):
        assert "is no model's name: write ollama:[[host/]namespace/]model[:tag]" in refusal(bad)


def test_a_model_that_the_store_lacks(store: Store) -> None:
    place = store.root / "manifests/registry.ollama.ai/library/other/latest"
    assert f"Ollama has no model 'other' here (looked for {place})" in refusal("other")
    assert "get it with `ollama pull other`" in refusal("other")


def test_environment_variables_set_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert "/home/someone/.ollama/models/manifests" in refusal()
    assert "/usr/share/ollama/.ollama/models/manifests" in refusal()


def test_layers_of_one_digest_are_read_once_and_drafts_ignored(folder: Path, store: Store) -> None:
    layers = store.layers(folder)
    draft = store.layer(TENSOR, "draft.model.norm.weight", b"never read")
    store.write(NAME, [*layers, {**layers[-1], "name": "again"}, draft])
    assert opened().match.weights == inspect(folder).match.weights


@pytest.mark.parametrize("scales", ["weight.scale", "weight_scale"])
@pytest.mark.parametrize("kind", ["nvfp4", "", "unheard-of"])
def test_scales_and_biases_are_renamed_in_any_order(
    tmp_path: Path, store: Store, kind: str, scales: str
) -> None:
    """The scales get our names, wherever they are in the file, and the layer's bias keeps its name.

    If the metadata lack the kind of quantisation, it follows from the shapes.
    """
    weights = random_weights(config(attention_bias=True))
    folder = write_checkpoint(tmp_path / "folder", weights=weights, attention_bias=True)
    layers = [layer for layer in store.layers(folder) if not layer["name"].startswith(UP)]
    parts = [
        (f"{UP}.{scales}", "U8", [48, 2], 1),
        (f"{UP}.weight", "U32", [48, 4], 4),
        (f"{UP}.weight_scale_2", "F32", list[int](), 4),
    ]
    metadata = {f"{UP}.weight.quant_type": kind} if kind else {}
    store.write(NAME, [*layers, quantised_layer(store, metadata, parts)])
    model_folder = opened()
    assert model_folder.match.layouts == {UP: QuantLayout("nvfp4", 4, 16)}
    names = [name.removeprefix(UP) for name in model_folder.tensors if name.startswith(UP)]
    assert names == [".weight", ".scales", ".factor"]


def test_a_layout_that_is_stated_wrongly(folder: Path, store: Store) -> None:
    layers = [layer for layer in store.layers(folder) if layer["name"] != f"{UP}.weight"]
    parts = [(f"{UP}.weight", "U32", [48, 4], 4), (f"{UP}.weight.scale", "U8", [48, 1], 1)]
    store.write(NAME, [*layers, quantised_layer(store, {"quant_type": "mxfp8"}, parts)])
    words = "has shape [48, 4], config.json asks for [48, 8] quantised (mxfp8, 8 bits in groups of"
    assert words in refusal()


def _tensor(layers: list[dict[str, Any]]) -> dict[str, Any]:
    return next(layer for layer in layers if layer["name"] == f"{UP}.weight")


def test_a_manifest_without_weights(store: Store) -> None:
    store.write(NAME, [store.layer("application/vnd.ollama.image.license", "", b"free")])
    assert "is a manifest without weights" in refusal()


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "sha256:../../../../etc/passwd"},
        {"digest": "sha256-../" + "0" * 61},
        {"digest": "md5:" + "0" * 64},
        {"digest": None},
        {"size": "12"},
    ],
)
def test_a_manifest_that_points_outside_its_store(folder: Path, store: Store, change: Any) -> None:
    layers = store.layers(folder)
    _tensor(layers).update(change)
    manifest = store.write(NAME, layers)
    assert f"{manifest} has the layer" in refusal()
    assert "its digest must be sha256: and 64 hex digits" in refusal()


def test_links_that_lead_outside_of_the_store(folder: Path, store: Store, tmp_path: Path) -> None:
    layers = store.layers(folder)
    manifest = store.write(NAME, layers)
    blob = store.blob(_tensor(layers))
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    words = f"is a link to {tmp_path / 'elsewhere'}, outside of the store: refused"
    assert f"{blob} {words}" in refusal()
    manifest.rename(tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    assert f"{manifest} {words}" in refusal()


def test_a_store_whose_root_is_a_link_is_fine(
    folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(NAME, store.layers(folder))
    (tmp_path / "link").symlink_to(store.root)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "link"))
    assert opened().match.weights == inspect(folder).match.weights


def test_blobs_that_are_missing_or_of_another_size(folder: Path, store: Store) -> None:
    layers = store.layers(folder)
    store.write(NAME, layers)
    blob = store.blob(_tensor(layers))
    size = blob.stat().st_size
    os.truncate(blob, size - 1)
    assert f"{blob} ({UP}.weight) has {size - 1} bytes, the manifest says {size}" in refusal()
    blob.unlink()
    assert f"{blob} ({UP}.weight) is missing: get the model again with" in refusal()
    assert f"`ollama pull {NAME}`" in refusal()


def test_a_small_file_with_a_wrong_digest(folder: Path, store: Store) -> None:
    layers = store.layers(folder)
    store.write(NAME, layers)
    blob = store.blob(next(layer for layer in layers if layer["name"] == "config.json"))
    blob.write_bytes(blob.read_bytes().replace(b"llama", b"LLAMA"))
    assert f"{blob} (config.json): its SHA-256 differs from the digest in its name" in refusal()


def test_weights_with_a_wrong_digest(folder: Path, store: Store) -> None:
    mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")
    from mlxpool.worker.weights.load import load

    layers = store.layers(folder)
    store.write(NAME, layers)
    sound = load(opened()).model.embed.weight  # type: ignore[attr-defined]
    assert mx.array_equal(sound, load(inspect(folder)).model.embed.weight).item()  # type: ignore[attr-defined]
    blob = store.blob(_tensor(layers))
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    model_folder = opened()
    words = f"{blob}: its SHA-256 differs from the digest in its name: get the model again with"
    with pytest.raises(ModelLoadFailed) as caught:
        load(model_folder)
    assert words in caught.value.message
    with pytest.raises(ModelLoadFailed):
        model_folder.files.verify(blob)


def test_manifests_that_cannot_be_read(folder: Path, store: Store) -> None:
    manifest = store.write(NAME, [])
    assert f"{manifest} has no layers" in refusal()
    manifest.write_text("{")
    assert f"{manifest} is not JSON" in refusal()
    layers = [layer for layer in store.layers(folder) if layer["mediaType"] != JSON]
    store.write(NAME, layers)
    assert "has no layer config.json: get the model again" in refusal()


def test_more_blobs_than_a_process_may_open(folder: Path, store: Store) -> None:
    pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("counts descriptors in /proc")
    from mlxpool.worker.weights.load import load

    store.write(NAME, store.layers(folder))
    model_folder = opened()
    before, most = len(list(fds.iterdir())), 0

    def count(tensors: int, size: int) -> None:
        nonlocal most
        most = max(most, len(list(fds.iterdir())))

    load(model_folder, count)
    assert len(model_folder.shards) > 25
    assert most - before < 5
