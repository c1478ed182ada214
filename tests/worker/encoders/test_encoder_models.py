"""Compares encoder models of all architectures with the same computation in plain NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlxpool.worker.encoders.folder import EncoderFolder, inspect_encoder
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.text import EncoderText
from mlxpool.worker.engine.encoding.encoder_engine import MIN_SHARE, EncoderEngine, shares_of
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.load import load
from support.float64 import softmax
from worker.encoders.checkpoints import CASES, PAIRS, TEXTS, Case, write
from worker.encoders.plain_numpy import POOLS, STATES, Array, head

MIN_COSINE = 0.9999
CHECKED = [name for name, case in CASES.items() if case.config["model_type"] in STATES]


def opened(folder: Path, case: Case) -> tuple[EncoderFolder, EncoderEngine, list[EncoderInput]]:
    """Returns a case's checkpoint, its engine, and the inputs with which it is tested."""
    encoder = inspect_encoder(folder_files(folder), "rerank" if case.answers else "")
    text = EncoderText(encoder.source)
    if encoder.task == "rerank":
        inputs = text.encode_pairs(PAIRS, truncate=True)
    else:
        inputs = text.encode_texts(TEXTS, prompt_name=case.prompt_name, truncate=True)
    return encoder, EncoderEngine(encoder, load(encoder.folder)), inputs


def expected(folder: Path, case: Case, encoder: EncoderFolder, given: EncoderInput) -> Array:
    """Returns the expected vector, score or probabilities of one input, without normalisation."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(str(folder / "model.safetensors"))
    tensors = {
        name.removeprefix(case.prefix): array.astype(np.float64) for name, array in stored.items()
    }
    types = list(given.types) or [0] * len(given.ids)
    states = STATES[config["model_type"]](config, tensors, list(given.ids), types)
    if encoder.task == "embed":
        return np.concatenate([POOLS[pooling](states) for pooling in case.poolings or ("mean",)])
    if case.answers:
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        logits = tensors["embed_tokens.weight"] @ states[-1]
        return np.asarray(softmax(logits[[vocabulary["no"], vocabulary["yes"]]])[1:])
    logits = head(config, tensors, states)
    if encoder.activation == "softmax":
        return np.asarray(softmax(logits))
    return 1 / (1 + np.exp(-logits)) if encoder.activation else logits


@pytest.mark.parametrize("name", CHECKED)
def test_equals_the_plain_computation(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write(tmp_path / "model", case)
    encoder, engine, inputs = opened(folder, case)
    outputs = engine.encode(inputs)
    wanted = np.array([expected(folder, case, encoder, encoder_input) for encoder_input in inputs])
    assert outputs.shape == wanted.shape
    assert outputs == pytest.approx(wanted, abs=1e-4)
    if encoder.task == "embed":
        lengths = np.linalg.norm(outputs, axis=1) * np.linalg.norm(wanted, axis=1)
        assert ((outputs * wanted).sum(1) / lengths).min() >= MIN_COSINE


def test_a_size_whose_pass_failed_is_new_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["embeddinggemma"]
    _, engine, _ = opened(write(tmp_path / "model", case), case)
    reports: list[int] = []
    engine.report_compiles(lambda: reports.append(1))
    text = [EncoderInput((1,) * 4)]

    def fails(texts: Any) -> Any:
        raise MemoryError("no room for the pass")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_rows", fails)
        with pytest.raises(MemoryError):
            engine.encode(text)
    for count in (2, 2):
        engine.encode(text)
        assert len(reports) == count


def test_a_pass_of_a_new_size_is_told_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["embeddinggemma"]
    _, engine, _ = opened(write(tmp_path / "model", case), case)
    seen: list[str] = []
    engine.report_compiles(lambda: seen.append("told"))
    build = engine._rows

    def built(texts: Any) -> Any:
        seen.append("built")
        return build(texts)

    monkeypatch.setattr(engine, "_rows", built)
    for lengths, new in (((4,), True), ((6,), False), ((4, 4), True), ((9,), True), ((9,), False)):
        seen.clear()
        engine.encode([EncoderInput((1,) * length) for length in lengths])
        assert seen == (["told", "built"] if new else ["built"]), lengths


def test_a_text_alone_has_the_vector_that_it_has_among_others(tmp_path: Path) -> None:
    case = CASES["embeddinggemma"]
    _, engine, inputs = opened(write(tmp_path / "model", case), case)
    together = engine.encode(inputs)
    alone = np.concatenate([engine.encode([encoder_input]) for encoder_input in inputs])
    assert together == pytest.approx(alone, abs=1e-4)
    assert together.shape == (len(TEXTS), engine.dimensions) == (len(TEXTS), 32)


@pytest.mark.parametrize("name", CHECKED)
def test_threads_give_the_same_rows(name: str, tmp_path: Path) -> None:
    """Computes many passes in three threads at once, so that a race would change rows."""
    _, engine, inputs = opened(write(tmp_path / "model", CASES[name]), CASES[name])
    many = (inputs * 12)[:40]
    alone = engine.encode(many)
    for _ in range(5):
        assert engine.encode(many, threads=3) == pytest.approx(alone, abs=1e-4)
    engine.close()


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(1, 5))
def test_shares_are_all_texts_in_order_and_about_equal(sizes: list[int], threads: int) -> None:
    sizes.sort()
    shares = list(shares_of(sizes, threads))
    assert [size for share in shares for size in sizes[share]] == sizes
    assert len(shares) <= threads
    tokens = [sum(sizes[share]) for share in shares]
    assert all(tokens)
    if len(shares) > 1:
        count = max(1, min(threads, sum(sizes) // MIN_SHARE))
        assert max(tokens) <= sum(sizes) / count + max(sizes)
