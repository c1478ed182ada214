"""Models in GGUF files equal the folders that they were made from, or errors name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.gguf import model
from mlxpool.worker.weights.gguf.header import read_gguf_header
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import find_files
from mlxpool.worker.weights.ollama_store import LICENCE, MODEL
from support.gguf_files import stored_weight, write_gguf
from support.prompts import chat_ids
from support.worker_checkpoints import EOS, GLM, config, random_weights, refusal, write_checkpoint
from support.worker_stores import Store

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.weights.load import load  # noqa: E402
from support.model_logits import logits_of  # noqa: E402

Change = Callable[[Path], None]
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}  # rows are whole blocks of 32
LLAMA: dict[str, Any] = {**WIDE, "attention_bias": True}
EXPERTS: dict[str, Any] = {
    **WIDE,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GPT_OSS: dict[str, Any] = {
    **WIDE,
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # architecture, changes of config.json, and the metadata with the same meaning
    "llama": ("llama", LLAMA, {}),
    "llama, yarn": (
        "llama",
        {
            **WIDE,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    ),
    "qwen2": ("qwen2", {**WIDE, "model_type": "qwen2", "tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {**WIDE, "model_type": "qwen3", "head_dim": 32}, {}),
    "qwen3moe": (
        "qwen3moe",
        {**EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
        {
            "qwen3moe.expert_count": 4,
            "qwen3moe.expert_used_count": 2,
            "qwen3moe.expert_feed_forward_length": 32,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            **WIDE,
            "model_type": "gemma3_text",
            "head_dim": 32,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 32,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        {"gemma3.attention.sliding_window": 5},
    ),
    "deepseek2": (
        "deepseek2",
        {**GLM, **WIDE, "v_head_dim": 8, "qk_nope_head_dim": 8},
        {
            "deepseek2.attention.head_count_kv": 1,
            "deepseek2.attention.q_lora_rank": 24,
            "deepseek2.attention.kv_lora_rank": 16,
            "deepseek2.attention.key_length_mla": 16,
            "deepseek2.attention.value_length_mla": 8,
            "deepseek2.rope.dimension_count": 8,
            "deepseek2.leading_dense_block_count": 1,
            "deepseek2.expert_count": 8,
            "deepseek2.expert_used_count": 2,
            "deepseek2.expert_shared_count": 1,
            "deepseek2.expert_feed_forward_length": 20,
            "deepseek2.expert_weights_scale": 1.8,
            "deepseek2.expert_weights_norm": True,
            "deepseek2.expert_gating_func": 2,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {**GPT_OSS, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "gpt-oss.attention.sliding_window": 8,
            "gpt-oss.expert_count": 4,
            "gpt-oss.expert_used_count": 2,
            "gpt-oss.expert_feed_forward_length": 96,
        },
    ),
}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "mlxpool" / "gguf"


def llama(tmp_path: Path, **more: Any) -> Path:
    settings = config(**LLAMA)
    return write_gguf(tmp_path / "m.gguf", random_weights(settings), settings, **more)


def opened(path: Path | str) -> ModelFolder:
    return inspect(find_files(str(path)))


def assert_equal(ours: ModelFolder, theirs: ModelFolder, within: float) -> None:
    """Compares logits; `within`: the largest allowed difference, relative to the largest logit."""
    actual, expected = (
        logits_of(load(folder, dtype=mx.float32), range(1, 14)) for folder in (ours, theirs)
    )
    assert np.abs(actual - expected).max() <= within * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_a_model_equals_its_folder(tmp_path: Path, case: str) -> None:
    architecture, changes, metadata = CASES[case]
    settings = config(**changes)
    weights = random_weights(settings)
    folder = write_checkpoint(tmp_path / "folder", weights=weights, **changes)
    file = write_gguf(
        tmp_path / "m.gguf", weights, settings, architecture=architecture, metadata=metadata
    )
    here, there = opened(file), inspect(folder)
    assert here.plan.shapes == there.plan.shapes
    assert here.plan.caches == there.plan.caches
    assert (here.context, here.bos_token) == (there.context, there.bos_token)
    assert_equal(here, there, 2e-5)


@pytest.mark.parametrize(
    ("case", "kind"),
    [("llama", kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")]
    + [("gpt-oss", "MXFP4")],
)
def test_quantised_weights_equal_their_numbers_in_safetensors(
    tmp_path: Path, case: str, kind: str
) -> None:
    """A model in GGUF gives the logits of a folder with the same, dequantised numbers.

    Of gpt-oss only the experts are quantised, of other models every matrix.
    """
    architecture, changes, metadata = CASES[case]
    settings, wanted = config(**changes), Kind[kind]

    def kind_of(name: str, weight: np.ndarray) -> Kind:
        experts = ".experts." in name and name.endswith(".weight")
        return wanted if (experts if case == "gpt-oss" else weight.ndim > 1) else Kind.F32

    weights = random_weights(settings)
    dense = {
        name: dequantize(quantize(array, wanted), wanted)
        if kind_of(name, array) == wanted
        else array
        for name, array in weights.items()
    }
    more: dict[str, Any] = {"architecture": architecture, "metadata": metadata, "kind": kind_of}
    here = opened(write_gguf(tmp_path / "m.gguf", weights, settings, **more))
    if case == "gpt-oss":
        assert here.match.layouts["model.layers.0.mlp.experts.up_proj"].mode == "mxfp4"
    folder = write_checkpoint(tmp_path / "folder", weights=dense, **changes)
    assert_equal(here, inspect(folder), 1e-4)


def test_texts_are_those_of_the_folder(tmp_path: Path) -> None:
    here = opened(llama(tmp_path))
    there = inspect(write_checkpoint(tmp_path / "folder", **LLAMA))
    ours, theirs = ChatTokenizer.from_folder(here), ChatTokenizer.from_folder(there)
    for text in ("Hello, wörld!\n  1234 \U0001f600", "<|user|>hi</s>"):
        assert ours.encode(text)[1:] == theirs.encode(text)
        assert ours.decode(ours.encode(text)[1:]) == theirs.decode(theirs.encode(text))
    assert ours.prefix == (256,)  # the BOS token, due to add_bos_token
    asked = chat_ids(ours, [{"role": "user", "content": "hi"}])
    assert ours.decode(asked.ids).endswith("<|user|>hi<|assistant|>")
    assert here.eos_ids == frozenset({EOS})


def test_llama_3s_wavelengths_follow_from_their_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    changes = {"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 500000.0}
    settings = config(**changes)
    turns = 8192 / (2 * np.pi * 500000.0 ** (np.arange(0, 32, 2) / 32))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    weights = random_weights(settings)
    file = write_gguf(tmp_path / "m.gguf", weights, settings, extra={"rope_freqs.weight": factors})
    assert opened(file).config["rope_scaling"] == scaling
    other = write_gguf(
        tmp_path / "n.gguf", weights, settings, extra={"rope_freqs.weight": factors[::-1].copy()}
    )
    assert "n.gguf: the tensor 'rope_freqs.weight' with other factors" in refusal(other)


def test_a_split_model(tmp_path: Path) -> None:
    llama(tmp_path, split=5)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    for path in (tmp_path, *parts):  # the path of any part means the whole model
        model_folder = opened(path)
        assert model_folder.shards == tuple(parts)
    folder = write_checkpoint(tmp_path / "folder", **LLAMA)
    assert_equal(opened(parts[0]), inspect(folder), 2e-5)
    parts[1].rename(tmp_path / "moved")
    assert f"1 are missing, the first is {parts[1].name}" in refusal(parts[0])
    parts[2].rename(parts[1])
    parts[0].replace(parts[2])
    assert "name the first part" in refusal(parts[1]) or "missing" in refusal(parts[1])


def test_a_folder_of_one_model(tmp_path: Path) -> None:
    file = llama(tmp_path)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")  # an image encoder, not a model
    assert opened(tmp_path).path == file
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "has 2 models (m.gguf, other.gguf): name one of the files" in refusal(tmp_path)


def test_safetensors_in_the_folder_are_what_it_means(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", **LLAMA)
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert opened(folder).shards == (folder / "model.safetensors",)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert "'b.safetensors'" in refusal(folder)


def test_what_downloads_leave_beside_a_file(tmp_path: Path) -> None:
    file = llama(tmp_path)
    (tmp_path / "._m.gguf").write_bytes(b"")  # a metadata file of macOS
    assert opened(tmp_path).path == file
    (tmp_path / "m.gguf.aria2").write_bytes(b"")
    for path in (tmp_path, file):
        assert "m.gguf is not complete: m.gguf.aria2 beside it" in refusal(path)


def test_in_ollamas_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    store = Store(tmp_path / "store")
    data = llama(tmp_path).read_bytes()
    weights = store.layer(MODEL, "", data)
    manifest = store.write("small:1b", [weights, store.layer(LICENCE, "", b"free to use")])
    model_folder = opened("ollama:small:1b")
    assert model_folder.path == manifest
    assert (model_folder.files / "LICENSE").read_bytes() == b"free to use"
    load(model_folder)
    blob = next(iter(model_folder.files.digests))
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ModelLoadFailed, match="its SHA-256 differs from the digest"):
        load(opened("ollama:small:1b"))
    blob.write_bytes(data[:-1])
    message = f"{blob} (the model) has {len(data) - 1} bytes, the manifest says {len(data)}"
    assert message in refusal("ollama:small:1b")
    blob.unlink()
    assert f"{blob} (the model) is missing: get" in refusal("ollama:small:1b")
    adapter = store.layer("application/vnd.ollama.image.adapter", "", b"x")
    store.write("small:1b", [weights, adapter])
    assert "has an adapter (LoRA), which is not read" in refusal("ollama:small:1b")


def test_what_is_made_of_metadata_is_made_once(tmp_path: Path, caches: Path) -> None:
    file = llama(tmp_path)
    first = opened(file)
    (cache,) = caches.iterdir()
    stamp = (cache / "tokenizer.json").stat().st_mtime_ns
    assert opened(file).digest == first.digest
    assert [cache] == list(caches.iterdir())
    assert (cache / "tokenizer.json").stat().st_mtime_ns == stamp
    assert cache.stat().st_mode & 0o077 == 0


def test_a_folder_of_caches_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file")
    words = refusal(llama(tmp_path))
    assert "cannot be written" in words and "XDG_CACHE_HOME" in words


@pytest.mark.parametrize(
    "architecture, metadata, words",
    [
        ("mamba", {}, "m.gguf has the architecture 'mamba', which is not read from GGUF; read are"),
        ("llama", {"llama.expert_count": 8}, "a mixture of experts of 'llama' is not read"),
        ("llama", {"llama.rope.dimension_count": 8}, "a rotation of 8 of a head's 16 numbers"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "the rope scaling 'longrope'"),
        ("llama", {"llama.block_count": None}, "no 'llama.block_count' in its metadata"),
        ("llama", {"llama.block_count": "two"}, "'two' as 'llama.block_count'"),
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, "must have a whole number"),
        ("llama", {"llama.block_count": 3}, "it describes 3 layers, the weights have 2"),
    ],
)
def test_what_is_not_read_is_named(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], words: str
) -> None:
    file = llama(tmp_path, architecture=architecture, metadata=metadata)
    assert words in refusal(file)


def test_a_surplus_tensor_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    file = llama(tmp_path, extra={"blk.0.attn_rel_b.weight": np.zeros((2, 2), np.float32)})
    assert "'blk.0.attn_rel_b.weight', unknown" in refusal(file)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    file = llama(tmp_path)
    model_folder = opened(file)
    last = max(read_gguf_header(file).tensors.values(), key=lambda tensor: tensor.begin)
    with file.open("r+b") as stream:
        stream.truncate(last.begin + 4)
    with pytest.raises(ModelLoadFailed, match=r"m\.gguf"):
        load(model_folder)


def test_a_header_is_read_once_unless_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[Path]()

    def counted(path: Path) -> Any:
        reads.append(path)
        return read_gguf_header(path)

    monkeypatch.setattr(model, "read_gguf_header", counted)
    file = llama(tmp_path)
    load(opened(file))
    assert reads == [file]
    model_folder = opened(file)
    file.rename(tmp_path / "old.gguf")
    llama(tmp_path, metadata={"general.name": "another, whose tensors begin elsewhere"})
    load(model_folder)
    assert reads == [file] * 3


def test_a_part_of_a_tensor(tmp_path: Path) -> None:
    from mlxpool.worker.weights.cuts import Cut

    name, settings = "model.layers.0.self_attn.q_proj.weight", config(**LLAMA)
    model_folder = opened(llama(tmp_path))
    weights, cut = model_folder.match.weights, Cut(0, 16, 48)
    shape = cut.shape_of(weights[name].shape)
    part = replace(
        model_folder,
        match=replace(model_folder.match, weights={name: replace(weights[name], shape=shape)}),
    )
    read = dict[str, Any]()

    def keep(arrays: dict[str, Any], *args: Any, **more: Any) -> Any:
        read.update(arrays)
        raise StopIteration

    with pytest.raises(StopIteration):
        load(part, cuts={name: cut}, make_builder=keep)
    expected = random_weights(settings)[name][16:48]
    assert np.array_equal(np.array(read[name]), expected)
    assert stored_weight(name, expected, "qwen2", settings) is expected
