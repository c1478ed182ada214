"""The GPU's kernel and the CPU's tables rotate equally; unusable rope types are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.attention.rotary import RotaryEmbedding  # noqa: E402
from mlxpool.worker.layers.layer_types import Rope  # noqa: E402
from mlxpool.worker.layers.rope import SCALINGS, parse_rope, yarn_mscale  # noqa: E402

SETTINGS: dict[str, Any] = {
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "long_factor": [1.0, 1.5, 2.0, 4.0],
}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("kind", SCALINGS)
def test_kernel_and_tables_rotate_alike(kind: str, traditional: bool) -> None:
    config = {"max_position_embeddings": 128, "rope_scaling": SETTINGS | {"rope_type": kind}}
    turn = parse_rope(config, 8, traditional=traditional)
    x = mx.array(np.random.default_rng(3).standard_normal((5, 3, 12), dtype=np.float32))
    rotation = RotaryEmbedding(mx.array([0, 7, 1, 300, 2000]))
    kernel, table = rotation.by_kernel(x, turn), rotation.by_table(x, turn)
    assert np.abs(np.array(kernel) - np.array(table)).max() < 2e-3  # for angles up to 2,000
    assert (np.array(kernel)[..., 8:] == np.array(x)[..., 8:]).all()


def test_wavelengths_are_scaled_between_one_and_the_factor() -> None:
    plain = [10000 ** (index / 8) for index in range(0, 8, 2)]
    for kind in ("llama3", "yarn"):
        turn = parse_rope({"rope_scaling": SETTINGS | {"rope_type": kind}}, 8)
        assert turn.freqs is not None
        stretch = [
            wavelength / period for wavelength, period in zip(turn.freqs, plain, strict=True)
        ]
        assert stretch == sorted(stretch)
        assert stretch[-1] == pytest.approx(4.0)
        assert min(stretch) >= 1 - 1e-9


def test_an_unscaled_context_has_the_default_rope() -> None:
    yarn = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32}
    turn = parse_rope({"rope_scaling": yarn}, 8)
    assert turn.gain == 1.0
    assert turn.freqs == pytest.approx([10000 ** (index / 8) for index in range(0, 8, 2)])
    assert (
        parse_rope({"rope_scaling": {"type": "mrope"}}, 8) == parse_rope({}, 8) == Rope(8, 10000.0)
    )
    assert yarn_mscale(0.5, 1.0) == yarn_mscale(8.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("config", "dims", "words"),
    [
        ({}, 7, "rotates 7 numbers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, 8, "no 'factor'"),
        ({"rope_theta": -1.0}, 8, "'rope_theta': -1.0"),
        ({"rope_theta": float("inf")}, 8, "'rope_theta': inf, must be finite"),
        ({"rope_theta": 10**400}, 8, "'rope_theta': a number of 1329 bits, must be finite"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, 8, "rope type \\['yarn'\\], must be one of"),
        (
            {"rope_theta": 1.0, "rope_scaling": {**SETTINGS, "rope_type": "yarn"}},
            8,
            "that are not valid for rope type 'yarn'",
        ),
        (
            {"rope_scaling": {**SETTINGS, "rope_type": "longrope", "long_factor": ["1"] * 4}},
            8,
            "'long_factor': '1', must be a number",
        ),
    ],
)
def test_unusable_settings_are_named(config: dict[str, Any], dims: int, words: str) -> None:
    with pytest.raises(ModelLoadFailed, match=words):
        parse_rope(config, dims)
