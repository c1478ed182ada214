"""Compares encoder models with stored results of sentence-transformers, see make_reference.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.worker.encoders.vectors import finished
from worker.encoders.checkpoints import CASES, write
from worker.encoders.make_reference import REFERENCE, checkpoint_digest
from worker.encoders.test_encoder_models import MIN_COSINE, opened

MAX_DIFFERENCE = 1e-3  # of scores and probabilities
MAX_BYTES = 200_000


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", CASES)
def test_equals_sentence_transformers(name: str, reference: dict[str, Any], tmp_path: Path) -> None:
    case, stored = CASES[name], reference["cases"][name]
    folder = write(tmp_path / "model", case)
    assert checkpoint_digest(folder) == stored["checkpoint"], "run make_reference.py again"
    encoder, engine, inputs = opened(folder, case)
    outputs, wanted = engine.encode(inputs), np.array(stored["rows"])
    if encoder.task != "embed":
        assert outputs == pytest.approx(wanted, abs=MAX_DIFFERENCE)
        return
    normalises = engine.normalises or bool(case.dimensions)
    outputs = finished(outputs, case.dimensions, normalise=normalises)
    lengths = np.linalg.norm(outputs, axis=1) * np.linalg.norm(wanted, axis=1)
    assert ((outputs * wanted).sum(1) / lengths).min() >= MIN_COSINE
    assert outputs == pytest.approx(wanted, abs=MAX_DIFFERENCE)


def test_the_reference_is_small_and_names_its_versions(reference: dict[str, Any]) -> None:
    assert REFERENCE.stat().st_size < MAX_BYTES
    assert set(reference["cases"]) == set(CASES)
    assert {"sentence-transformers", "transformers", "torch"} < set(reference["versions"])
