"""Parts of tensors, for the shard of a model's weights on one rank of a group. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import mlx.core as mx


class Cut(Struct, frozen=True):
    """The slice [begin, end) along a tensor's `axis`.

    `zeros`: in place of a slice, zeros with the whole shape of the tensor.
    """

    axis: int = 0
    begin: int = 0
    end: int = 0
    zeros: bool = False

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this part of a tensor of the given shape."""
        if self.zeros:
            return shape
        return (*shape[: self.axis], self.end - self.begin, *shape[self.axis + 1 :])

    def of(self, array: mx.array) -> mx.array:
        """Returns this part of an array, not evaluated.

        The part does not keep the whole array in memory.
        """
        import mlx.core as mx

        if self.zeros:
            return mx.zeros(array.shape, array.dtype)
        inside = (slice(None),) * self.axis + (slice(self.begin, self.end),)
        return mx.contiguous(array[inside])
