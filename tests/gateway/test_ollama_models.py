"""Models in the form of Ollama's interface."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.ollama.models import pull_statuses, running, show, tag

ROW = {"name": "m", "state": "ready", "type": "llama", "size": 100, "memory": 700, "context": 64}
YEAR = 365 * 86_400


def info(**more: Any) -> ModelInfo:
    return ModelInfo.from_row({**ROW, **more})


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, ""),
        (0, ""),
        (12, "12"),
        (3_706_112, "3.7M"),
        (8_030_261_248, "8.0B"),
        (10**12, "1.0T"),
    ],
)
def test_the_number_of_parameters(count: int | None, words: str) -> None:
    assert tag(info(parameters=count), 0)["details"]["parameter_size"] == words


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("4-bit affine g64", "Q4_0"), ("4-bit affine g32, mixed", "Q4_0"),
        ("5-bit affine g32", "Q5_0"), ("8-bit affine g32", "Q8_0"), ("6-bit affine g64", "Q6_K"),
        ("3-bit affine g64", "Q3_K_M"), ("2-bit affine g64", "Q2_K"), ("4-bit mxfp4 g32", "MXFP4"),
        ("8-bit mxfp8 g32", "MXFP8"), ("4-bit nvfp4 g16", "NVFP4"), ("f32", "F32"),
        ("f16", "F16"), ("bf16", "BF16"), (None, ""),
    ],
)  # fmt: skip
def test_quantisation_is_told_in_ollamas_words(words: str | None, level: str) -> None:
    assert tag(info(quantisation=words), 0)["details"]["quantization_level"] == level


def test_a_digest_is_long_enough_for_ollamas_command_line() -> None:
    assert tag(info(), 0)["digest"] == "0" * 12
    assert tag(info(digest="counting-500"), 0)["digest"] == "counting-500"


def test_times_are_those_of_the_files_or_the_gateways_start() -> None:
    assert tag(info(modified=0), 86_400)["modified_at"] == "1970-01-01T00:00:00Z"
    assert tag(info(), 86_400)["modified_at"] == "1970-01-02T00:00:00Z"


def test_when_a_model_expires() -> None:
    assert running(info(expires_in=90.0), 0.0)["expires_at"] == "1970-01-01T00:01:30Z"
    for never in (-1.0, None):
        year = int(running(info(expires_in=never), 0.0)["expires_at"][:4])
        assert year - 1970 > 100, "Ollama's command line says Forever"
    assert running(info(expires_in=1.0), 0.0)["size"] == 700


def test_show_names_what_is_known_only() -> None:
    body = show(info(), 0)
    assert body["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 0,
        "llama.context_length": 64,
    }
    details = {"width": 8, "heads": None, "template": "T", "license": "MIT License"}
    sampling = {"temperature": 0.6, "top_k": 20}
    about = {"layers": 2, "details": {**details, "sampling": sampling}, "digest": "d"}
    full = show(info(about=about), 0, verbose=True)
    assert full["model_info"]["llama.embedding_length"] == 8
    assert "llama.attention.head_count" not in full["model_info"]
    assert (full["template"], full["model_info"]["mlxpool.digest"]) == ("T", "d")
    assert full["license"] == "MIT License"
    lines = [line.split() for line in full["parameters"].splitlines()]
    assert lines == [["temperature", "0.6"], ["top_k", "20"]]


def test_what_pull_says() -> None:
    assert [status["status"] for status in pull_statuses(info())] == [
        "pulling manifest", "verifying sha256 digest", "writing manifest", "success",
    ]  # fmt: skip
    layer = pull_statuses(info(about={"digest": "ab" * 32}))[1]
    assert layer["status"] == "pulling abababababab"
    assert (layer["total"], layer["completed"]) == (100, 100)
