"""Headers of GGUF files: the contents of good headers, the error of each bad one."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.gguf.header import read_gguf_header
from support.gguf_files import write_gguf
from support.worker_checkpoints import config, random_weights

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    settings = config(**SIZES)
    return write_gguf(
        tmp_path / "m.gguf",
        random_weights(settings),
        settings,
        kind=lambda name, weight: Kind.Q8_0 if weight.ndim > 1 else Kind.F32,
        metadata={"llama.some.list": [1, 2, 3], "llama.some.texts": ["a", "bc"]},
    )


def refusal(file: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        read_gguf_header(file)
    return str(caught.value)


def rewritten(file: Path, at: int, part: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[at : at + len(part)] = part
    file.write_bytes(data)
    return file


def test_it_has_what_llama_cpps_package_reads(file: Path) -> None:
    ours, theirs = read_gguf_header(file), GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.tensors) == len(theirs.tensors)
    data = file.read_bytes()
    for expected in theirs.tensors:
        tensor = ours.tensors[expected.name]
        assert tensor.kind.name == expected.tensor_type.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert data[tensor.begin : tensor.begin + tensor.nbytes] == expected.data.tobytes()


def test_every_cut_is_told(file: Path) -> None:
    data, header = file.read_bytes(), read_gguf_header(file)
    last = max(tensor.begin + tensor.nbytes for tensor in header.tensors.values())
    cuts = [*range(4, len(header.raw), 199), len(header.raw) - 1, len(header.raw), last - 1]
    for cut in cuts:
        file.write_bytes(data[:cut])
        assert "cut short; download it again" in refusal(file), cut


def test_other_formats_and_versions(file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "empty.gguf is no GGUF file: it begins with b''" in refusal(tmp_path / "empty.gguf")
    (tmp_path / "begun.gguf").write_bytes(b"GGU")
    assert "it begins with b'GGU'" in refusal(tmp_path / "begun.gguf")
    assert "has version 7 of GGUF" in refusal(rewritten(file, 4, struct.pack("<I", 7)))
    assert "is big-endian" in refusal(rewritten(file, 4, struct.pack(">I", 3)))
    assert "begins with b'PKUF'" in refusal(rewritten(file, 0, b"PK"))


def test_absurd_counts_take_no_memory(file: Path) -> None:
    words = refusal(rewritten(file, 8, struct.pack("<Q", 2**60)))  # number of tensors
    assert "axes, must have 1 to 4" in words  # of data after the list, read as a tensor
    words = refusal(rewritten(file, 24, struct.pack("<Q", 2**62)))  # bytes of the first key
    assert "cut short" in words


def test_types_that_are_not_read_are_named(file: Path) -> None:
    data = file.read_bytes()
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    assert struct.unpack_from("<I", data, at) == (Kind.Q8_0,)
    words = refusal(rewritten(file, at, struct.pack("<I", Kind.IQ2_XS)))
    assert "tensor 'blk.0.attn_q.weight' is of the type IQ2_XS, which is not read" in words
    assert "F32, F16, Q4_0" in words
    assert "type number 777" in refusal(rewritten(file, at, struct.pack("<I", 777)))
    words = refusal(rewritten(file, at, struct.pack("<I", Kind.Q4_K)))
    assert "rows of Q4_K are whole blocks of 256" in words


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_are_an_error_or_a_header(file: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    size = len(read_gguf_header(file).raw)
    for at in draw.integers(4, size, 8).tolist():
        rewritten(file, at, bytes([int(draw.integers(256))]))
    try:
        read_gguf_header(file)
    except ModelLoadFailed as error:
        assert str(file) in str(error)
