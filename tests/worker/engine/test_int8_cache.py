"""An engine with 8-bit keys and values: capacity, resumed streams, and models that are refused."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.worker_checkpoints import GLM, QWEN3_NEXT, config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import ModelConfig  # noqa: E402
from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker import versions  # noqa: E402
from mlxpool.worker.attention import layout_choice  # noqa: E402
from mlxpool.worker.attention.in_pool import paged_layout  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.compute.model_source import open_source  # noqa: E402
from mlxpool.worker.diagnose.check import check  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.kernels.compiled_passes import ComputedKinds  # noqa: E402
from mlxpool.worker.prefix import tree_cache  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.transfers.uploads import Uploads  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from mlxpool.worker.weights.locate import DEMO_FOLDER  # noqa: E402
from support.engine_steps import decode, enter  # noqa: E402
from support.kv_agreement import compare  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

pytestmark = pytest.mark.skipif(device.on_gpu(), reason="MLX's operations on a CPU are tested here")

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 12,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": None,
    },
    "qwen3_next": {**QWEN3_NEXT, "head_dim": 16},
}
PROMPT = tuple((7 * n + n * n) % 250 for n in range(45))
TOKENS = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    loaded = {}
    for name, changes in MODELS.items():
        weights = random_weights(config(**changes))
        loaded[name] = load(inspect(write_checkpoint(folder / name, weights=weights, **changes)))
    return loaded


def sequence(ids: tuple[int, ...], tokens: int = TOKENS, **options: Any) -> Sequence:
    wanted = Options.parse({"ignore_eos": True, "temperature": 0.0, **options})
    return Sequence(b"", 1, ids, wanted, 3, tokens)


def answer(engine: ModelEngine, prompt: tuple[int, ...], tokens: int, chunk: int) -> list[int]:
    """Returns the tokens drawn after a prompt that is read in chunks of `chunk` tokens."""
    seq = sequence(prompt, tokens)
    enter(engine, seq, chunk)
    decode(engine, [seq], tokens)
    engine.release(seq)
    return list(seq.ids)


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_stream_goes_on_with_the_same_tokens(
    name: str, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream resumes after any token, in chunks of any size, with and without prefix tree.

    The models have full attention, sliding windows, and recurrent layers between these.
    """
    monkeypatch.setattr(tree_cache, "RESTORE_POINT_INTERVAL", 16)
    engine = model_engine(models[name], kv="int8", lookahead=False)
    assert engine.layout == ("slabs, int8" if name == "llama" else "rows, int8")
    whole = answer(engine, PROMPT, TOKENS, 512)
    for taken, chunk in ((1, 7), (9, 512), (TOKENS - 1, 16)):
        resumed = (*PROMPT, *whole[:taken])
        assert answer(engine, resumed, TOKENS - taken, chunk) == whole[taken:]
    again = model_engine(models[name], kv="int8", lookahead=False, prefix="off")
    for taken, chunk in ((0, 1), (5, 7), (17, 512)):
        resumed = (*PROMPT, *whole[:taken])
        assert answer(again, resumed, TOKENS - taken, chunk) == whole[taken:]


def test_deterministic_answers_have_the_same_bits_alone_and_resumed(tmp_path: Path) -> None:
    """The bits of quantised keys and values do not depend on the batch or on a resume."""
    loaded = load(inspect(write_checkpoint(tmp_path)), deterministic=True)
    engine = model_engine(loaded, kv="int8", prefix="off")
    options = {"logprobs": True, "top_logprobs": 5}
    rows = [sequence(PROMPT[salt:], TOKENS, **options) for salt in range(3)]
    for seq in rows:
        enter(engine, seq, 16)
    together = [
        drawn.logprob for drawn in decode(engine, rows, TOKENS) if drawn.sequence is rows[0]
    ]
    alone = sequence((*PROMPT, *rows[0].ids[:10]), TOKENS - 10, **options)
    enter(engine, alone)
    assert [drawn.logprob for drawn in decode(engine, [alone], TOKENS - 10)] == together[10:]


def test_a_preempted_and_a_rewound_row_go_on_as_they_were(models: dict[str, LoadedModel]) -> None:
    """A preemption drops the row; a rewind removes wrong drafts from it."""
    engine = model_engine(models["llama"], kv="int8", prefix="off")
    whole = answer(engine, PROMPT, TOKENS, 512)
    seq = sequence(PROMPT)
    enter(engine, seq)
    decode(engine, [seq], 5)
    engine.release(seq)
    seq.preempt()
    enter(engine, seq)
    decode(engine, [seq], 3)
    wrong = whole[9] ^ 1
    engine.submit([Span.check(seq, (whole[8], wrong, 7))])
    seq.ids += [drawn.token for drawn in engine.collect().drawn]
    assert seq.ids == whole[:10]
    decode(engine, [seq], TOKENS - 10)
    assert seq.ids == whole


def test_twice_as_many_tokens_fit_into_the_memory(models: dict[str, LoadedModel]) -> None:
    """Compares the blocks of engines with the same limit, and the bytes of their rows."""
    limit = device.non_mlx_bytes() + 2**30
    sizes = {}
    for kv in ("auto", "int8"):
        engine = model_engine(models["llama"], kv=kv, limit=limit)
        answer(engine, PROMPT, 2, 512)
        seq = sequence(PROMPT)
        enter(engine, seq)
        sizes[kv] = engine.blocks.capacity, engine.kv_use()[1]
        engine.close()
    assert sizes["int8"][0] / sizes["auto"][0] >= 1.9
    assert sizes["auto"][1] / sizes["int8"][1] >= 1.9


def test_8_bits_keep_the_likeliest_token() -> None:
    """Compares the demo model's likeliest tokens over 600 tokens of Python's library."""
    loaded = load(inspect(DEMO_FOLDER))
    source = Path(argparse.__file__).read_text("utf-8")
    ids = ChatTokenizer.from_folder(loaded.folder).encode(source)[:600]
    comparison = compare(loaded, ids, window=300)
    assert comparison.positions == 600 and 0 < comparison.divergence < 1e-3
    assert comparison.share >= 0.99
    assert comparison.capacity >= 1.9


def test_another_kind_of_cache_is_another_digest(
    models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """The digest differs for each kind of cache, so that no stream is resumed with another kind."""
    path = write_checkpoint(tmp_path)
    engines = [model_engine(models["llama"], kv=kv) for kv in ("auto", "int8")]
    plain, quantised = (engine.digest for engine in engines)
    assert plain == versions.digest_of(models["llama"].folder.digest) != quantised
    config = ModelConfig(path=str(path), kv="int8")
    source, report = open_source(config), check("name", config)
    assert source.opened.digest == report["model"]["digest"] == quantised


@pytest.mark.parametrize("name", ["builtin:counting", "builtin:demo-embed", "glm4_moe_lite"])
def test_models_without_keys_and_values_refuse_it(name: str, tmp_path: Path) -> None:
    """Both the load and `mlxpool check` refuse the model; the error names the reason."""
    path = str(write_checkpoint(tmp_path, **GLM)) if name == "glm4_moe_lite" else name
    config = ModelConfig(path=path, kv="int8")
    with pytest.raises(ModelLoadFailed, match="kv = 'int8' is not built for"):
        open_source(config)
    (problem,) = check("name", config)["problems"]
    assert "kv = 'int8' is not built for" in problem and "leave it out" in problem


def test_a_gpu_without_kernels_for_the_heads_refuses_it(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(layout_choice, "writes_in_place", lambda shape, on_gpu: False)
    with pytest.raises(ModelLoadFailed, match=r"no kernel of ours reads .* 2 of 8 and 8 numbers"):
        model_engine(models["llama"], kv="int8")


def test_a_gpu_without_cuda_refuses_it(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names the missing kernels for Metal, whatever the heads of the model."""
    path = write_checkpoint(tmp_path, head_dim=64)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    wanted = "on this GPU, as the kernels .* are written for CUDA, not for Metal"
    with pytest.raises(ModelLoadFailed, match=wanted) as refused:
        model_engine(models["llama"], kv="int8")
    assert "heads" not in str(refused.value)
    config = ModelConfig(path=str(path), kv="int8")
    (why,) = check("name", config, machine=True)["machine"]["why"]
    assert re.search(wanted, why)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    assert check("name", config, machine=True)["machine"]["why"] == []


def test_an_operator_is_told_that_resumed_answers_may_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`mlxpool check` reports this, and so does a worker that loads the model."""
    path = str(write_checkpoint(tmp_path))
    (note,) = check("name", ModelConfig(path=path, kv="int8"))["notes"]
    assert "may go on with other tokens" in note and "deterministic = true" in note
    caplog.set_level("INFO", "mlxpool.worker")
    for changes, expected in (
        ({"kv": "int8"}, True),
        ({"kv": "int8", "deterministic": True}, False),
        ({}, False),
    ):
        config = ModelConfig(path=path, **changes)
        assert bool(check("name", config)["notes"]) is expected
        caplog.clear()
        open_source(config).load(lambda tensors, size: None)
        assert (note in caplog.messages) is expected


@pytest.mark.usefixtures("machine")
def test_a_model_of_images_has_memory_for_rows_that_operations_read(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes with images have no attention kernel for 8-bit keys and values.

    In these passes MLX's operations read dequantised keys and values. Only a model with images
    reserves memory for them.
    """
    runner, probe = SimpleNamespace(kinds=ComputedKinds()), SimpleNamespace(supported=True)
    monkeypatch.setattr(paged_layout, "RaggedRunner", lambda *_, **__: runner)
    monkeypatch.setattr(paged_layout, "attention_of", lambda *_, **__: probe)
    shape = RowShape((KeyValueSpec(2, 64, 64),) * 2, mx.bfloat16, 3000, keeps_all=True, kv="int8")
    model, read_bytes = models["llama"].model, {}
    for images in (False, True):
        layout = layout_choice.make_layout(
            "pool",
            shape,
            model,
            4,
            rows=4,
            deterministic=False,
            on_gpu=True,
            uploads=Uploads(),
            images=images,
        )
        assert layout.reads_int8
        read_bytes[images] = layout.read_bytes
        layout.close()
    # 3,000 tokens of a layer, three times: copies of integers and scales, and dequantised numbers.
    assert read_bytes == {False: 0, True: 3 * 3000 * 2 * (2 * 66 + 2 * 64 * 2)}
