"""Random model folders of known shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.bench import checkpoint
from mlxpool.bench.our_engine import OurEngine, prompt
from mlxpool.bench.shapes import SHAPES
from mlxpool.bench.traffic.swarm import text_of
from mlxpool.worker import models
from mlxpool.worker.weights.inspect import inspect


@pytest.mark.parametrize("quantise", ["", "affine", "mxfp4"])
def test_the_folder_of_a_shape_can_be_loaded(tmp_path: Path, quantise: str) -> None:
    folder = checkpoint.write(tmp_path / "tiny", "tiny", layers=1, quantise=quantise)
    ours = OurEngine(folder)
    step = ours.steps([5, 9])
    step()
    assert ours.vocabulary == SHAPES["tiny"]["vocab_size"]
    assert len(inspect(folder).plan.caches) == 1


def test_every_byte_of_a_prompt_is_a_token(tmp_path: Path) -> None:
    ours = OurEngine(checkpoint.write(tmp_path / "tiny", "tiny"))
    assert len(ours.text.encode(text_of(7, 100))) == 100
    words = b"".join(ours.text.piece(token) for token in prompt(50, ours.vocabulary))
    assert words.decode(errors="ignore")


def test_weights_are_split_into_shards(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "tiny", "tiny", max_shard_bytes=50_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    OurEngine(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_supported_architecture(shape: str) -> None:
    assert models.plan(checkpoint.config_of(shape)).vocab_size == SHAPES[shape]["vocab_size"]


def test_an_unknown_shape_or_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no shape 'big'; there are tiny, small, llama-3.2-1b"):
        checkpoint.config_of("big")
    with pytest.raises(ValueError, match=r"no mode 'q4'; there are affine, mxfp4"):
        checkpoint.config_of("tiny", quantise="q4")
