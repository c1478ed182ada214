"""Models quantised by mlx-lm give the same logits as in mlx-lm, in every quantisation mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.worker_checkpoints import write_checkpoint
from support.worker_stores import Store

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.layers import builder  # noqa: E402
from mlxpool.worker.layers.builder import WeightLayerBuilder  # noqa: E402
from mlxpool.worker.layers.linear import ConcatenatedLinear, QuantisedLinear  # noqa: E402
from mlxpool.worker.layers.quantisation import MODES, QuantLayout  # noqa: E402
from mlxpool.worker.layers.quantised_weight import CPU_DEQUANTISE_ROWS, QuantisedWeight  # noqa: E402
from mlxpool.worker.scheduling.memory_estimate import dequantises_at_load  # noqa: E402
from mlxpool.worker.weights.inspect import dequantised_growth, inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from mlxpool.worker.weights.locate import find_files  # noqa: E402
from support import model_logits  # noqa: E402

# Arguments of mlx_lm.convert: mode, bits, group size, and settings of single modules.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    **{f"affine {bits}": ("affine", bits, 32, {}) for bits in (2, 3, 4, 5, 6, 8)},
    "affine, groups of 64": ("affine", 4, 64, {}),
    "affine, groups of 128": ("affine", 8, 128, {}),
    "mxfp4": ("mxfp4", 4, 32, {}),
    "mxfp8": ("mxfp8", 8, 32, {}),
    "nvfp4": ("nvfp4", 4, 16, {}),
    "per layer": (
        "affine",
        4,
        64,
        {
            "model.layers.0.self_attn.k_proj": {"group_size": 32, "bits": 8},
            "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
            "model.layers.1.mlp.gate_proj": False,
            "model.embed_tokens": {"group_size": 128, "bits": 6},
            "lm_head": False,
        },
    ),
}
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}

# Runs in its own process: importing mlx_lm.utils lowers RLIMIT_NOFILE for good.
PEER = """
import json, sys
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)  # a GPU multiplies float32 with less of its fraction
from pathlib import Path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

for source, path, dtype, mode, bits, group, named, prompt in json.load(sys.stdin):
    model, config = load_model(Path(source))
    model.set_dtype(getattr(mx, dtype))
    model, config = quantize_model(
        model, config, group, bits, mode, quant_predicate=lambda name, _: named.get(name, True)
    )
    save_model(path, model)
    save_config(config, Path(path) / "config.json")
    model, _ = load_model(Path(path))
    model.set_dtype(mx.float32)
    np.save(Path(path) / "peer.npy", np.array(model(mx.array([prompt]))[0, -1]))
"""
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 256, 37)]


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.worker.weights.load.device_dtype", lambda folder: mx.float32)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns mlx-lm's conversions of one checkpoint, each with mlx-lm's logits in its folder."""
    root = tmp_path_factory.mktemp("quantised")
    plain = write_checkpoint(root / "plain", attention_bias=True, **SHAPE)
    tied = write_checkpoint(root / "tied", tie_word_embeddings=True, **SHAPE)
    jobs, paths = [], {}
    for number, (case, (mode, bits, group, named)) in enumerate(CASES.items()):
        path = paths[case] = root / str(number)
        source, dtype = (plain, "float32") if number % 2 else (tied, "bfloat16")
        jobs.append((str(source), str(path), dtype, mode, bits, group, named, PROMPT))
    peer = [sys.executable, "-c", PEER]
    done = subprocess.run(peer, input=json.dumps(jobs), text=True, capture_output=True)
    if done.returncode and "No module named 'mlx_lm'" in done.stderr:
        pytest.skip("mlx-lm is not installed")
    assert done.returncode == 0, done.stderr
    for path in paths.values():
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (path / name).symlink_to(plain / name)
    return paths


def logits_of(loaded: LoadedModel) -> np.ndarray:
    return model_logits.logits_of(loaded, PROMPT)


@pytest.mark.parametrize("case", CASES)
def test_equals_mlx_lm(case: str, quantised: dict[str, Path]) -> None:
    path = quantised[case]
    peer = np.load(path / "peer.npy")
    folder = inspect(path)
    mode, bits, group, _ = CASES[case]
    assert folder.match.layouts["model.layers.0.self_attn.q_proj"] == QuantLayout(mode, bits, group)
    ours = logits_of(load(folder))
    assert np.abs(ours - peer).max() < 1e-4 * np.abs(peer).max()


@pytest.mark.parametrize("case", ["affine 3", "mxfp4", "per layer"])
def test_deterministic_models_have_the_same_numbers(case: str, quantised: dict[str, Path]) -> None:
    peer = np.load(quantised[case] / "peer.npy")
    loaded = load(inspect(quantised[case]), deterministic=True)
    assert np.abs(logits_of(loaded) - peer).max() < 1e-4 * np.abs(peer).max()


@pytest.mark.parametrize("case", CASES)
def test_dequantised_models_have_the_same_logits_and_the_estimated_memory(
    case: str, quantised: dict[str, Path]
) -> None:
    peer, folder = np.load(quantised[case] / "peer.npy"), inspect(quantised[case])
    packed, opened = load(folder), load(folder, dequantise=True)
    assert np.abs(logits_of(opened) - peer).max() < 1e-4 * np.abs(peer).max()
    numbers = sum(int(np.prod(shape)) for shape in folder.plan.shapes.values())
    bytewise = "affine" in case or case == "per layer"
    assert (opened.weight_bytes > 4 * numbers) == (bytewise and sys.platform == "linux")
    assert load(folder, deterministic=True).weight_bytes == 4 * numbers
    assert packed.weight_bytes + dequantised_growth(folder, 4) == opened.weight_bytes


def test_weights_are_dequantised_on_a_cpu_where_memory_suffices(quantised: dict[str, Path]) -> None:
    folder = inspect(quantised["affine 4"])
    needed = load(folder, dequantise=True).weight_bytes
    assert dequantises_at_load(folder, limit=4 * needed, float32=True)
    assert not dequantises_at_load(folder, limit=4 * needed - 4, float32=True)
    assert not dequantises_at_load(folder, limit=4 * needed, float32=False)
    assert not dequantises_at_load(
        inspect(quantised["affine 4"].parent / "plain"), limit=10**12, float32=True
    )


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("transpose", [True, False])
def test_a_product_is_the_same_for_any_number_of_rows(mode: str, transpose: bool) -> None:
    bits, group = MODES[mode].bits[0], MODES[mode].group_sizes[0]
    numbers = mx.random.normal((64, 128), key=mx.random.key(2))
    arrays = dict(
        zip(("weight", "scales", "biases"), mx.quantize(numbers, group, bits, mode), strict=False)
    )
    layout = QuantLayout(mode, bits, group)
    weight = QuantisedWeight.of({f"a.{kind}": array for kind, array in arrays.items()}, "a", layout)
    lines = mx.random.normal(
        (CPU_DEQUANTISE_ROWS + 2, 128 if transpose else 64), key=mx.random.key(3)
    )
    whole = weight(lines, transpose=transpose)
    single = mx.concatenate([weight(line[None], transpose=transpose) for line in lines])
    assert np.abs(np.array(whole - single)).max() < 1e-5 * np.abs(np.array(single)).max()


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("case", ["affine 3", "affine 8", "mxfp4", "mxfp8", "nvfp4", "per layer"])
def test_ollamas_store_gives_the_logits_of_its_folder(
    case: str,
    stated: bool,
    quantised: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(tmp_path)
    store.write("case:latest", store.layers(quantised[case], stated=stated))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    ours = load(inspect(find_files("ollama:case")))
    assert np.array_equal(logits_of(ours), logits_of(load(inspect(quantised[case]))))


def test_layers_of_one_layout_are_concatenated_and_others_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "on_gpu", lambda: True)
    four, eight = QuantLayout("affine", 4, 32), QuantLayout("affine", 8, 32)

    def layer(*layouts: QuantLayout) -> object:
        named = {str(number): layout for number, layout in enumerate(layouts)}
        weights: dict[str, Any] = {}
        for name, layout in named.items():
            packed = mx.quantize(mx.ones((8, 64)), layout.group_size, layout.bits)
            kinds = ("weight", "scales", "biases")
            weights |= {f"{name}.{kind}": array for kind, array in zip(kinds, packed, strict=True)}
        return WeightLayerBuilder(weights, named, mx.float32).concatenated(list(named))

    assert isinstance(layer(four, four), QuantisedLinear)
    assert isinstance(layer(four, eight), ConcatenatedLinear)


@pytest.mark.parametrize("shape", [(48, 64), (3, 48, 64)])
def test_a_global_scale_is_applied_once(shape: tuple[int, ...]) -> None:
    """MLX defines the scale by the largest absolute number of the tensor, or of each expert."""
    numbers = mx.random.normal(shape, key=mx.random.key(1)) * 1e-3
    scale = mx.max(mx.abs(numbers), axis=(-2, -1))
    single = [numbers] if len(shape) == 2 else list(numbers)
    pairs = [
        mx.quantize(tensor, 16, 4, mode="nvfp4", global_scale=greatest)
        for tensor, greatest in zip(single, scale.reshape(-1), strict=True)
    ]
    expected = mx.stack(
        [
            mx.dequantize(
                *pair, group_size=16, bits=4, mode="nvfp4", global_scale=greatest, dtype=mx.float32
            )
            for pair, greatest in zip(pairs, scale.reshape(-1), strict=True)
        ]
    ).reshape(shape)
    weight, scales = (mx.stack([pair[i] for pair in pairs]) for i in (0, 1))
    arrays = {
        "m.weight": weight.reshape(*shape[:-1], -1),
        "m.scales": scales.reshape(*shape[:-1], -1),
        "m.global_scale": scale,
    }
    packed = QuantisedWeight.of(arrays, "m", QuantLayout("nvfp4", 4, 16))
    assert mx.allclose(packed.dequantised(mx.float32), expected, rtol=1e-5, atol=0).item()
    x = mx.random.normal((5, 64), key=mx.random.key(2))
    wanted = x @ expected.swapaxes(-1, -2)
    assert mx.allclose(packed(x if len(shape) == 2 else x[None]), wanted, atol=1e-5).item()
    if len(shape) == 2:
        rows = packed.rows(mx.array([3, 0]), mx.float32)
        assert mx.allclose(rows, expected[mx.array([3, 0])], rtol=1e-5, atol=0).item()
    else:
        experts = WeightLayerBuilder(
            arrays, {"m": QuantLayout("nvfp4", 4, 16)}, mx.float32
        ).switch_linear("m")
        chosen = mx.array([[0, 2], [1, 1], [2, 0], [1, 2], [0, 1]])
        for token in range(5):
            for place in range(2):
                line = wanted[chosen[token, place], token]
                assert mx.allclose(experts(x, chosen)[token, place], line, atol=1e-5).item()
