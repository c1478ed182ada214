"""Column-major weights have the same values in another memory order."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.layers import builder  # noqa: E402


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (16, 4096), (515, 257), (2048, 33), (1, 70000)])
def test_values_stay_and_columns_are_contiguous(
    shape: tuple[int, int], numpy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("weights lie by columns on the CPU alone")
    if not numpy:
        monkeypatch.setattr(builder, "np", None)
    weight = mx.random.normal(shape, key=mx.random.key(0))
    weight[0, 0] = float("nan")
    cut = shape[0] // 3 + 1
    turned = builder.to_column_major([weight[:cut], weight[cut:]] if shape[0] > cut else [weight])
    assert np.array_equal(np.array(turned), np.array(weight), equal_nan=True)
    assert np.array(turned, copy=False).T.flags.c_contiguous


def test_another_dtype() -> None:
    weight = mx.random.normal((300, 400)).astype(mx.bfloat16)
    assert mx.array_equal(builder.to_column_major([weight]), weight).item()
