"""Published models in GGUF answer like the same numbers in safetensors.

Only `make test-all` runs these tests. A copy of each model is written in safetensors, with the
numbers that llama.cpp's own package reads from the GGUF file. mlx-lm computes the copy: mlx-lm's
ids must be the stored ids, and our logits must be close to mlx-lm's logits.
end_to_end/test_published_models.py compares a pool with the stored ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from mlxpool.worker.weights.locate import find_files
from support import mlx_lm_peer, published_models
from support.gguf_files import llama_cpp_name
from support.prompts import chat_ids

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_logits import read, row_of  # noqa: E402

COMPUTED = 3  # number of stored prompts that are computed here
STORED = json.loads(published_models.ANSWERS.read_text(encoding="utf-8"))
SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass
class Published:
    """A model in GGUF, and the folder of the same model in float32."""

    folder: ModelFolder
    dense: Path

    @cached_property
    def loaded(self) -> LoadedModel:
        return load(self.folder, dtype=mx.float32)

    @cached_property
    def text(self) -> ChatTokenizer:
        return ChatTokenizer.from_folder(self.folder)

    def logits(self, prompt: list[int], forced: list[int]) -> np.ndarray:
        """Returns the logits [n, V] after the prompt and after each id of `forced` but the last."""
        row, parts = row_of(self.loaded), [prompt, *([token] for token in forced[:-1])]
        return np.stack([read(self.loaded, row, ids) for ids in parts])

    def greedy(self, prompt: list[int], steps: int) -> list[int]:
        """The likeliest next ids, drawn one after the other."""
        ids: list[int] = []
        for _ in range(steps):
            ids.append(int(self.logits(prompt + ids, [0])[-1].argmax()))
        return ids


def write_dense(file: Path, folder: ModelFolder, path: Path) -> Path:
    """Writes a model folder in float32, with the weights that llama.cpp's package reads.

    The tensors have our names. config.json and the tokenizer's files are those of `folder`.
    """
    path.mkdir()
    for name in SMALL_FILES:
        shutil.copy(folder.files / name, path / name)
    config = json.loads((path / "config.json").read_text())
    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    for name in folder.plan.shapes:
        tensor = stored[llama_cpp_name(name, architecture)]
        shape = tuple(reversed(tensor.shape.tolist()))
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        weights[name] = np.ascontiguousarray(_released(name, weight, architecture, config))
    save_file(weights, str(path / "model.safetensors"))
    return path


def _released(
    name: str, weight: np.ndarray, architecture: str, config: dict[str, Any]
) -> np.ndarray:
    """Returns the weight as it was released, without the changes of llama.cpp's conversion."""
    keys = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    heads = next((config[key] for part, key in keys.items() if part in name), 0)
    if architecture == "llama" and heads:
        return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight - np.float32(1)
    return weight


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("caches")
    files = [published_models.smollm2(), published_models.gemma3()]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CACHE_DIRECTORY", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for file in files:
            (folder / file.name).symlink_to(file)
        yield folder


def opened(caches: Path, name: str) -> Published:
    file = caches / name
    folder = inspect(find_files(str(file)))
    return Published(folder, write_dense(file, folder, caches / f"{name}-dense"))


@pytest.fixture(scope="module")
def smollm2(caches: Path) -> Published:
    return opened(caches, "smollm2.gguf")


@pytest.fixture(scope="module")
def gemma3(caches: Path) -> Published:
    return opened(caches, "gemma3-270m.gguf")


def largest_difference(model: Published, stored: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the largest difference of our logits from mlx-lm's, and the fraction of equal ids.

    The difference is relative to the largest logit. Checks that mlx-lm gives the stored ids and
    perplexities. Logits are compared for COMPUTED prompts.
    """
    prompts = [model.text.encode(text) for text in (*stored["ids"], STORED["text"])]
    steps = len(next(iter(stored["ids"].values())))
    mlx_lm_peer.ask({"paths": [str(model.dense)], "prompts": prompts, "steps": steps})
    peer = np.load(model.dense / "peer.npz")
    assert peer["ids"].tolist()[:-1] == list(stored["ids"].values())
    assert peer["perplexities"][-1] == pytest.approx(stored["perplexity"], rel=1e-4)
    differences, equal = [], []
    each = zip(prompts, peer["ids"], peer["logits"], strict=True)
    for prompt, ids, expected in islice(each, COMPUTED):
        ours = model.logits(prompt, ids.tolist())
        differences.append(np.abs(ours - expected).max() / np.abs(expected).max())
        equal.append(np.mean(ours.argmax(-1) == ids))
    return max(differences), float(np.mean(equal))


def test_smollm2_gives_the_ids_of_its_numbers_in_mlx_lm(smollm2: Published) -> None:
    difference, equal = largest_difference(smollm2, STORED["smollm2"])
    assert equal == 1.0 and difference < 1e-4


def test_smollm2_knows_the_capital_of_france(smollm2: Published) -> None:
    text = smollm2.text
    assert text.decode(smollm2.greedy(text.encode("The capital of France is"), 2)) == " Paris."
    assert smollm2.folder.eos_ids == frozenset({0, 2})
    asked = chat_ids(text, [{"role": "user", "content": "What is the capital of France?"}])
    assert text.decode(asked.ids).startswith("<|im_start|>system\nYou are a helpful AI")
    assert "Paris" in text.decode(smollm2.greedy(list(asked.ids), 12))


def test_gemma_in_k_types_is_as_good_as_its_numbers(gemma3: Published) -> None:
    """The logits are close to those of the weights that llama.cpp's package reads.

    Nine weights differ: they are in Q6_K, and are rounded once more at load.
    """
    difference, equal = largest_difference(gemma3, STORED["gemma3"])
    assert equal > 0.9 and difference < 0.03
    assert gemma3.folder.bos_token == "<bos>" and 106 in gemma3.folder.eos_ids
    text = "Hello, wörld!\n\n  1234 \U0001f600 ▁ <end_of_turn>"
    ids = gemma3.text.encode(text)
    assert ids[0] == 2 and ids[-1] == 106
    assert gemma3.text.decode(ids[1:]) == text.replace("▁", " ")
