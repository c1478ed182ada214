"""The content of a message: its kind, its body and its blobs. Headers are added by the sender."""

from __future__ import annotations

from typing import Any, ClassVar

from mlxpool.common.protocol.frames import MAX_BODY, Header, encode


class Content:
    """Base of every typed message. A subclass is a frozen dataclass with its fields.

    Where a message is received as well as sent, `parse` makes the dataclass from a body and its
    blobs; unknown keys are ignored.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def body(self) -> dict[str, Any] | None:
        """The body as msgpack packs it; None sends the header alone."""
        return {}

    def blobs(self) -> tuple[bytes, ...]:
        """The raw parts behind the body."""
        return ()


def encoded(
    content: Content,
    id: bytes | None = None,
    epoch: int = 0,
    attempt: int = 0,
    pos: int = 0,
    *,
    max_body: int = MAX_BODY,
) -> list[bytes]:
    """The parts of a message with this content. Raises TooLarge and BadRequest as `encode` does."""
    header = Header(content.kind, id, epoch, attempt, pos)
    return encode(header, content.body(), content.blobs(), max_body=max_body)
