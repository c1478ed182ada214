"""Tests the kernel that computes a whole decode pass: which models it supports, and its tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.worker_checkpoints import GLM, config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention import layout_choice  # noqa: E402
from mlxpool.worker.decode_pass import choice, kernel, model_weights, trial  # noqa: E402
from mlxpool.worker.decode_pass.model_weights import PassShape  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.layers import builder, dense_weights  # noqa: E402
from mlxpool.worker.layers.layer_types import Rope  # noqa: E402
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import ModelFolder, inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import simt  # noqa: E402
from support.engine_steps import decode, decode_spans, enter, step  # noqa: E402
from support.logprob_errors import assert_near  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

ON_GPU = mx.cuda.is_available()
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 288,
    "max_position_embeddings": 1024,
}
STEPS = 3
PROMPTS = [(5,), (77,)]  # one token each: prompts are not tested here


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The kernels that the simulated GPU has run."""
    if ON_GPU:
        pytest.skip("a GPU does not report the kernels that it runs")
    with simt.simulated() as kernels:
        monkeypatch.setattr(layout_choice, "writes_in_place", lambda shape, on_gpu: True)
        monkeypatch.setattr(choice, "MIN_MULTIPROCESSORS", 2)
        monkeypatch.setattr(device, "multiprocessors", lambda: 2)
        yield kernels


def model_folder(path: Path, **changes: Any) -> ModelFolder:
    settings = {**SIZES, **changes}
    weights = random_weights(config(**settings))
    halved = {
        name: np.array(mx.array(weight).astype(mx.bfloat16).astype(mx.float32))
        for name, weight in weights.items()
    }
    return inspect(write_checkpoint(path, weights=halved, **settings))


def drawn(engine: ModelEngine) -> list[list[SampledToken]]:
    """Decodes rows that enter the batch one after the other; returns the tokens of each."""
    options = Options(temperature=0.0, logprobs=True, top_logprobs=4)
    rows = [Sequence(b"", 1, prompt, options, 11, 9) for prompt in PROMPTS]
    tokens: dict[int, list[SampledToken]] = {id(seq): [] for seq in rows}
    for count, seq in enumerate(rows, 1):
        enter(engine, seq)
        for _ in range(STEPS):
            for sampled in decode(engine, rows[:count]):
                tokens[id(sampled.sequence)].append(sampled)
    for seq in rows:
        engine.release(seq)
    return list(tokens.values())


def test_an_engine_draws_the_same_tokens(
    tmp_path: Path, called: set[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """With the kernel an engine's log-probabilities are near those of a float32 engine without it.

    They are compared up to the first token that differs.
    """
    caplog.set_level(logging.INFO, "mlxpool.worker")
    folder = model_folder(tmp_path)
    plain = drawn(model_engine(load(folder), layout="rows", lookahead=False))
    for module in (builder, dense_weights):
        monkeypatch.setattr(module, "on_gpu", lambda: True)  # weights as a GPU has them
    engine = model_engine(load(folder, dtype=mx.bfloat16), layout="pool", lookahead=True, blocks=30)
    called.clear()  # drops the kernels that trials called
    ours = drawn(engine)
    assert "decode_pass" in called and not called & {"ragged_attention", "rms_norm"}
    assert "one kernel computes a decode pass" in caplog.text
    assert_near(ours, plain)


def test_an_engine_checks_drafts_by_it(
    tmp_path: Path, called: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that check drafts have several consecutive inputs in the pass.

    Other rows have one input.
    """
    folder = model_folder(tmp_path)
    plain = model_engine(load(folder), layout="rows", lookahead=False)
    for module in (builder, dense_weights):
        monkeypatch.setattr(module, "on_gpu", lambda: True)  # weights as a GPU has them
    engine = model_engine(load(folder, dtype=mx.bfloat16), layout="pool", lookahead=True, blocks=30)
    options = Options(temperature=0.0, logprobs=True, top_logprobs=4)
    answers = []
    for prompt in PROMPTS:
        seq = Sequence(b"", 1, prompt, options, 11, 9)
        enter(plain, seq)
        answers.append(decode(plain, [seq], 6))
        plain.release(seq)
    rows = [Sequence(b"", 1, prompt, options, 11, 9) for prompt in PROMPTS]
    for seq in rows:
        enter(engine, seq)
    called.clear()
    right = [tuple(sampled.token for sampled in answer) for answer in answers]
    wrong = (right[0][3] + 1) % folder.plan.vocab_size
    first = step(engine, [Span.check(rows[0], (*right[0][:3], wrong, 7)), *decode_spans(rows[1:])])
    row_tokens = [[sampled for sampled in first if sampled.sequence is seq] for seq in rows]
    assert [len(group) for group in row_tokens] == [4, 1]
    for seq, tokens in zip(rows, row_tokens, strict=True):
        seq.ids += [sampled.token for sampled in tokens]
    second = step(engine, [*decode_spans(rows[:1]), Span.check(rows[1], right[1][1:4])])
    for tokens, seq in zip(row_tokens, rows, strict=True):
        tokens += [sampled for sampled in second if sampled.sequence is seq]
    assert [[sampled.token for sampled in tokens] for tokens in row_tokens] == [
        list(o[:5]) for o in right
    ]
    assert_near(row_tokens, [answer[:5] for answer in answers])
    assert "decode_pass" in called and not called & {"ragged_attention", "rms_norm"}


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "it computes in"),
    "tied": ({"tie_word_embeddings": True}, "it computes in"),
    "mistral with windows": ({"model_type": "mistral", "sliding_window": 99}, "it computes in"),
    "qwen2": ({"model_type": "qwen2"}, "it computes in"),
    "qwen3": ({"model_type": "qwen3"}, "it computes in"),
    "biases behind attention": ({"attention_bias": True}, "of another kind"),
    "biases of the feed-forward": ({"mlp_bias": True}, "of another kind"),
    "latent attention": ({**GLM, "head_dim": None}, "of another kind"),
}


@pytest.mark.parametrize("name", KINDS)
def test_which_models_it_serves(name: str, tmp_path: Path) -> None:
    """The kernel refuses each unsupported kind of model with a reason for that kind.

    The dtype is checked last. All models of this test are in float32, so models of a supported kind
    are refused only for their dtype.
    """
    changes, why = KINDS[name]
    model = load(inspect(write_checkpoint(tmp_path, **changes)), dtype=mx.float32).model
    reason = model_weights.weights_of(model, mx.float32)
    assert isinstance(reason, str) and why in reason


SHAPE = PassShape(
    layers=1, hidden=2048, width=8192, kv_heads=8, group=4, size=64, rope=Rope(64, 1e4), scale=0.1,
    eps=1e-5, head_eps=0.0, biased=False, dtype=mx.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"dtype": mx.float16, "biased": True, "head_eps": 1e-6}, ""),
        ({"dtype": mx.float32}, "it computes in"),
        ({"hidden": 2048 + 64}, "a weight is"),
        ({"width": 8192 + 32}, "a weight is"),
        ({"width": 14336, "hidden": 4096}, "takes longer than the host"),
        ({"size": 32, "kv_heads": 16}, "its heads have 32"),
        ({"group": 32}, "its heads have 64"),
        ({"size": 128}, "its heads have 128"),
        ({"rope": Rope(64, 1e4, axes=(0, 1))}, "and 64 of them rotate"),
    ],
)
def test_which_shapes_it_serves(changes: dict[str, Any], why: str) -> None:
    reason = model_weights.unsupported(replace(SHAPE, **changes))
    assert why in reason and bool(reason) == bool(why)


def test_a_kernel_has_the_shared_memory_that_it_needs() -> None:
    """Every kernel has at least four product stages, within the memory of a Hopper GPU."""
    for size, group in ((64, 4), (64, 16), (128, 2), (128, 16)):
        for layers in (16, 64):
            shape = replace(SHAPE, size=size, group=group, kv_heads=2, layers=layers)
            for sets in kernel.SETS:
                products, attention = kernel.stages_of(shape, sets)
                assert products >= 4 and attention >= 1
                assert kernel.shared_bytes(shape, sets) <= kernel.MAX_SHARED_BYTES


def test_it_needs_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread blocks of a launch wait for each other, so all of them must run at once."""
    pools = [(mx.zeros((1,)),) * 2]
    monkeypatch.setattr(trial, "works", lambda dtype: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 131)
    assert "fewer than 132" in choice.missing(mx.bfloat16, pools)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    assert choice.missing(mx.bfloat16, pools) == ""
    assert "integers" in choice.missing(mx.bfloat16, [pools[0] * 2])
    monkeypatch.setattr(device, "shares_multiprocessors", lambda: True)
    assert "MPS" in choice.missing(mx.bfloat16, pools)
    monkeypatch.undo()
    assert device.multiprocessors() == 0 or ON_GPU


def test_how_many_lines_a_pass_may_have() -> None:
    assert choice.serves(1) and choice.serves(128) and not choice.serves(160)
