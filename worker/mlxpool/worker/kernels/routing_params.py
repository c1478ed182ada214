"""The parameters of expert routing. No MLX."""

from __future__ import annotations

from msgspec import Struct


class RoutingParams(Struct, frozen=True):
    """Parameters of routing: each token chooses the `chosen` best of `count` experts.

    The experts' weights are a softmax of all logits, or sigmoids of logits. With a softmax, an
    array [E] may be added to the logits. With sigmoids, an array [E] may be added only for the
    choice of experts: the weights are the sigmoids without it. If the experts are in `groups`, the
    choice treats the sigmoids outside of the `chosen_groups` best groups as 0. A group is rated by
    its two best experts.
    """

    count: int
    chosen: int
    sigmoid: bool
    normed: bool  # whether the weights of a token's experts are scaled to add up to `factor`
    factor: float = 1.0  # multiplies all weights
    groups: int = 1
    chosen_groups: int = 1
