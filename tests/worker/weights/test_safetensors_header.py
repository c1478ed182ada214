"""Safetensors headers that do not agree with their file are refused; errors name the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxpool.worker.weights import safetensors_header
from support.worker_checkpoints import refusal, write_checkpoint, write_raw_safetensors


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "good")


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{]", "the header is not JSON"),
    "not a map": (b"[]", "the header is a list"),
    "tensor is no map": (b'{"w": 3}', "tensor 'w' is described by 3"),
    "dtype": (json.dumps({"w": entry(dtype="F12")}).encode(), "'w' has dtype 'F12'"),
    "shape": (json.dumps({"w": entry(shape=[-1])}).encode(), r"'w' has shape [-1]"),
    "offsets": (json.dumps({"w": entry(offsets=[8, 0])}).encode(), "data_offsets [8, 0]"),
    "outside": (
        json.dumps({"w": entry(shape=[5], offsets=[0, 20])}).encode(),
        "'w' ends at byte 20 of the data, the file has 16",
    ),
    "span": (json.dumps({"w": entry(shape=[3])}).encode(), "has 8 bytes, its shape [3] of F32"),
    "axes": (json.dumps({"w": entry("U8", [16, *[1] * 32], [0, 16])}).encode(), "33 axes, at most"),
    "complex numbers": (json.dumps({"w": entry("C64", [2], [0, 16])}).encode(), "has dtype 'C64'"),
    "numbers of 4 bits": (json.dumps({"w": entry("F4", [32], [0, 16])}).encode(), "dtype 'F4'"),
    "metadata of numbers": (
        b'{"__metadata__": {"a": 1}}',
        "__metadata__ has 1 for 'a', must be text",
    ),
    "metadata is no map": (b'{"__metadata__": 5}', "__metadata__ is a int, must be a map"),
    "gap": (
        json.dumps({"v": entry(shape=[1], offsets=[0, 4]), "w": entry(offsets=[8, 16])}).encode(),
        "'w' begins at byte 8 of the data, 4 are in use",
    ),
    "more data": (json.dumps({"w": entry()}).encode(), "have 8 bytes of data, the file has 16"),
    "huge axes": (json.dumps({"w": entry(shape=[2**63, 0])}).encode(), "has shape"),
    "overlap": (
        json.dumps({"v": entry(), "w": entry(offsets=[4, 12])}).encode(),
        "'v' and 'w' overlap: 0..8 and 4..12",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_bad_safetensors_header(good: Path, case: str) -> None:
    header, words = HEADERS[case]
    write_raw_safetensors(good / "model.safetensors", header, bytes(16))
    assert words in refusal(good)
    assert "model.safetensors" in refusal(good)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: download it again"),
        (b"\x01\0\0", "truncated: 3 bytes"),
        ((500).to_bytes(8, "little") + b"{}", "truncated: the header claims 500 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "at most 100000000"),
    ],
)
def test_a_safetensors_file_that_ends_early(good: Path, content: bytes, words: str) -> None:
    (good / "model.safetensors").write_bytes(content)
    assert words in refusal(good)


def test_a_truncated_download(good: Path) -> None:
    file = good / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated, download it again" in refusal(good)


def test_metadata_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    content = {
        "__metadata__": {"format": "pt"},
        "w": entry(),
        "e": entry(shape=[0], offsets=[8, 8]),
    }
    write_raw_safetensors(tmp_path / "x", json.dumps(content).encode(), bytes(8))
    header = safetensors_header.read_header(tmp_path / "x")
    assert {name: tensor.nbytes for name, tensor in header.tensors.items()} == {"w": 8, "e": 0}
    assert header.metadata == {"format": "pt"}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.uint32)}
    save_file(arrays, tmp_path / "x", {"format": "mlx"})
    header = safetensors_header.read_header(tmp_path / "x")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()} == {
        "a": ("F16", (2, 3)),
        "b": ("U32", ()),
    }
