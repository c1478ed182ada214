"""The estimated memory of a model."""

from mlxpool.worker.scheduling.memory_estimate import default_prefix_cache_bytes


def test_the_prefix_cache_gets_a_quarter_of_what_weights_leave() -> None:
    assert default_prefix_cache_bytes(1000, 200) == 200
    assert default_prefix_cache_bytes(100, 200) == 0
