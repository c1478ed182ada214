"""Compares an engine with all our kernels to one without; simulated by simt.py without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.worker_checkpoints import GLM, config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention import layout_choice  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.engine.engine import StepResult  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.pass_spans import PassSpans  # noqa: E402
from mlxpool.worker.engine.trial_passes import (  # noqa: E402
    compile_kernels,
    drop_rows,
    dummy_spans,
    kinds_of_passes,
    warm,
)
from mlxpool.worker.kernels import kernel_cache  # noqa: E402
from mlxpool.worker.layers import builder  # noqa: E402
from mlxpool.worker.sampling.row_masks import RowMasks  # noqa: E402
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import simt  # noqa: E402
from support.engine_steps import decode, decode_spans, enter  # noqa: E402
from support.logprob_errors import WORST, assert_near  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "vocab_size": 288,
    "max_position_embeddings": 1024,
}
LATENT: dict[str, Any] = {
    **GLM,
    **SIZES,
    "head_dim": None,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
}
COMMON = {"block_copy", "sampling", "rms_norm", "host_write"}
COMMON |= {"rope_tables", "take_rows", "take_numbers", "column_sums"}
RAGGED = COMMON | {"ragged_attention", "rotate_and_write", "table_update", "known_tokens"}
MODELS: dict[str, tuple[dict[str, Any], bool, set[str]]] = {
    "llama": (SIZES, False, RAGGED | {"matmul_small", "matmul_tiled"}),
    "llama, 4 bits": (
        SIZES,
        True,
        # Products of this many lines with dequantised weights do not compute the gate.
        RAGGED
        | {"matmul_4bit", "matmul_small", "matmul_tiled", "swiglu"}
        | {"dequantise", "dequantise_rows"},
    ),
    "llama, 4 bits in tiles": (
        {**SIZES, "vocab_size": 320},  # a whole number of tiles
        True,
        RAGGED
        | {
            "tile_4bit",
            "rows_4bit",
            "matmul_4bit_few",
            "matmul_4bit_integers",
            "matmul_4bit_tiled",
            "matmul_small",
        },
    ),
    "llama, int8 keys and values": (
        SIZES,
        False,
        (RAGGED - {"rotate_and_write"}) | {"rotate_and_quantise", "matmul_small", "matmul_tiled"},
    ),
    "glm": (
        LATENT,
        False,
        (RAGGED - {"ragged_attention", "rotate_and_write"})
        | {"latent_lines", "ragged_latents", "head_product"}
        | {"matmul_small", "matmul_tiled"}
        | {"expert_routing", "expert_product", "expert_sum", "expert_token"}
        | {"latent_token", "latent_token_out"},
    ),
}
PROMPTS = [tuple((7 * n + n * n + salt) % 256 for n in range(40)) for salt in (0, 0, 3)]
STEPS = 6
ON_GPU = mx.cuda.is_available()


def halved(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights rounded to bfloat16."""
    return {
        name: array if array.dtype == np.uint32 else np.array(rounded(array))
        for name, array in weights.items()
    }


def steadied(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights with smaller attention scores and router scores.

    With unchanged random weights of GLM's shape, the scores of two latents or two experts can be
    close. Then rounding all weights to bfloat16 changes log-probabilities by up to 1.4 nats in
    float32. With the smaller scores the change is less than 0.4 nats.
    """
    factors = {"self_attn": 0.5, "mlp.gate.weight": 0.25}
    return {
        name: array * next((f for part, f in factors.items() if part in name), 1)
        if "norm" not in name
        else array
        for name, array in weights.items()
    }


def rounded(array: np.ndarray) -> Any:
    return mx.array(array).astype(mx.bfloat16).astype(mx.float32)


def quantised(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Quantises the linear layers and the embedding to 4 bits in groups of 64."""
    stored = {}
    for name, array in weights.items():
        if not name.endswith(("proj.weight", "embed_tokens.weight")):
            stored[name] = array
            continue
        parts = mx.quantize(mx.array(array), group_size=64, bits=4)
        for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
            stored[name.removesuffix("weight") + kind] = np.array(part)
    return stored


def drawn(engine: ModelEngine, called: set[str], *, fused: bool) -> list[list[SampledToken]]:
    """Returns the tokens of three rows that decode together, and of a fourth row after them.

    The prompt of the fourth row begins with that of the first row, which is then in the prefix
    cache.
    """
    options = Options(temperature=0.0, logprobs=True, top_logprobs=4)
    rows = [Sequence(b"", 1, prompt, options, 11, STEPS) for prompt in PROMPTS]
    for seq in rows:
        enter(engine, seq, 512)
    steps = []
    for _ in range(STEPS):
        before = set(called)
        called.clear()
        steps.append(decode(engine, rows))
        assert (
            not fused or "rms_norm" not in called
        )  # products of few tokens compute norms and sums
        called |= before
    for seq in rows:
        engine.release(seq)
    twin = Sequence(b"", 1, (*PROMPTS[0], 9, 8), options, 11, 1)
    enter(engine, twin, 512)
    assert twin.cached == len(PROMPTS[0])
    again = decode(engine, [twin])
    engine.release(twin)
    return [*zip(*steps, strict=True), again]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODELS)
def test_kernels_do_not_change_the_tokens_of_an_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities are compared with those of float32, up to the first token that differs."""
    changes, packed, expected = MODELS[name]
    weights = random_weights(config(**changes))
    if name == "glm":
        weights = steadied(weights)
    if packed:
        weights = quantised(weights)
        changes = {**changes, "quantization": {"group_size": 64, "bits": 4}}
    folder = inspect(write_checkpoint(tmp_path, weights=halved(weights), **changes))
    kv, suffix = ("int8", ", int8") if "int8" in name else ("auto", "")
    alone = model_engine(load(folder), layout="rows", lookahead=False, kv=kv)
    plain = drawn(alone, set(), fused=False)
    loaded = load(folder, dtype=mx.bfloat16)
    with simt.token_grid_machine() as called:
        if "tiles" in name:  # tiles are made at load, on a GPU
            monkeypatch.setattr(builder, "on_gpu", lambda: True)
            loaded = load(folder, dtype=mx.bfloat16)
        monkeypatch.setattr(layout_choice, "writes_in_place", lambda shape, on_gpu: True)
        engine = model_engine(loaded, layout="pool", lookahead=False, blocks=30, kv=kv)
        assert engine.layout == f"pool, own kernels{suffix}"
        ours = drawn(engine, called, fused="ragged_latents" not in expected)
    assert called == (set() if ON_GPU else expected)  # a GPU does not report the kernels
    assert_near(ours, plain)


def test_kernels_are_listed_without_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of all compiled passes are listed; the engine stays as it was, uncompiled."""
    folder = inspect(
        write_checkpoint(tmp_path, weights=halved(random_weights(config(**SIZES))), **SIZES)
    )
    listed: list[str] = []
    monkeypatch.setattr(
        kernel_cache,
        "compile_together",
        lambda jobs, _: listed.extend(job.text.name for job in jobs),
    )
    loaded = load(folder, dtype=mx.bfloat16)
    with nullcontext() if ON_GPU else simt.simulated():
        monkeypatch.setattr(layout_choice, "writes_in_place", lambda shape, on_gpu: True)
        engine = model_engine(loaded, layout="pool", context=20, max_sequences=2, blocks=30)
        engine.expect_drafts(3)
        free = engine.blocks.available
        compile_kernels(engine, kinds_of_passes(engine), lambda: None)
        assert engine.blocks.available == free and not engine.inspect().rows
        kinds = list(kinds_of_passes(engine))
        for kind in kinds:
            spans = dummy_spans(engine, kind)
            wants = PassSpans.of(spans, rewinds=True)
            rows = [RowSpan(engine.inspect().rows[span.sequence], span.count) for span in spans]
            wants.widen(rows)
            assert engine.inspect().layout.is_new(rows, wants.wanted)
            drop_rows(engine, [span.sequence for span in spans])
        # Passes with drafts are computed as well, beside a prompt and without.
        checks = {bool(kind.unread): kind for kind in kinds if kind.drafts}
        for kind in (checks[False], checks[True]):
            warm(engine, kind, lambda: None)
            assert engine.blocks.available == free and not engine.inspect().rows
    names = {name.removeprefix("mlxpool_") for name in listed}
    assert {"ragged_attention", "rotate_and_write", "sampling", "host_write", "rms_norm"} <= names


def expected_tokens(
    engine: ModelEngine, salts: int = 400
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Returns two prompts, each with its next tokens.

    The first three of these tokens are much likelier than all other tokens.
    """
    options, cases = Options(temperature=0.0, logprobs=True, top_logprobs=2), []
    for salt in range(salts):
        prompt = tuple((7 * n + n * n + salt) % 256 for n in range(20))
        seq = Sequence(b"", 1, prompt, options, 11, STEPS)
        enter(engine, seq)
        tokens = decode(engine, [seq], STEPS)
        engine.release(seq)
        tops = [token.logprob.top for token in tokens if token.logprob is not None]
        if all(first[1] - second[1] > WORST for first, second in tops[:3]):
            cases.append((prompt, [token.token for token in tokens]))
        if len(cases) == 2:
            return cases
    raise AssertionError("no prompts have tokens that are likelier by far than others")


def take(engine: ModelEngine) -> StepResult:
    """Collects a pass and appends its tokens."""
    result = engine.collect()
    for sampled in result.drawn:
        sampled.sequence.ids.append(sampled.token)
    return result


def test_ragged_passes_check_drafts_give_hidden_states_and_draw_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of three rows, a pass that checks drafts draws more tokens than it has rows."""
    weights = halved(random_weights(config(**SIZES)))
    folder = inspect(write_checkpoint(tmp_path, weights=weights, **SIZES))
    exact = load(folder)
    plain = model_engine(exact, layout="rows", prefix="off", lookahead=False)
    (first, right), (second, other) = expected_tokens(plain)
    text = PROMPTS[2][:9]
    row = RowSpan(plain.inspect().layout.store.new_row(), len(text))
    states = exact.model.hidden_states(mx.array(text, dtype=mx.int32), RowBatch([row], None))
    loaded = load(folder, dtype=mx.bfloat16)
    with simt.token_grid_machine():
        monkeypatch.setattr(layout_choice, "writes_in_place", lambda shape, on_gpu: True)
        engine = model_engine(loaded, layout="pool", lookahead=True, blocks=30, max_sequences=3)
        assert (
            isinstance(engine.inspect().layout, PagedLayout)
            and engine.inspect().layout.ragged is not None
        )
        checking, beside = (
            Sequence(b"", 1, each, Options(temperature=0.0), 1, 9) for each in (first, second)
        )
        for seq in (checking, beside):
            enter(engine, seq)
        engine.submit([Span.check(checking, (*right[:2], right[2] ^ 1)), *decode_spans([beside])])
        engine.submit(decode_spans([beside]))  # the input is the token in flight
        take(engine)
        assert (checking.ids, checking.submitted, engine.inspect().rows[checking].offset) == (
            right[:3],
            22,
            22,
        )
        engine.forward(decode_spans([checking]))
        take(engine)
        assert beside.ids == other[:2]
        without = np.full((1, 9), 2**32 - 1, np.uint32)
        without[0, right[3] // 32] ^= np.uint32(1 << right[3] % 32)
        table = engine.mask_memory(1)
        assert table is not None
        table.masks[0] = without
        engine.draw(RowMasks(table, 1, {checking: 0}))
        take(engine)
        assert checking.ids[3] != right[3] and 0 <= checking.ids[3] < 288
        del checking.ids[3]  # as if the token had not been drawn
        embedded = Sequence(b"", 1, text, Options(), 1, 1)
        engine.admit(embedded)
        engine.submit([Span(embedded, 0, len(text), 0, hidden=True), *decode_spans([beside])])
        result = take(engine)
        assert beside.ids == other[:3]
        (hidden,) = result.hidden
        want = np.array(states)
        assert hidden.states.dtype == np.float32
        assert np.abs(hidden.states - want).max() < 5e-2 * np.abs(want).max()
