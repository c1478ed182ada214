"""Owners that a client names: for whom it asks, where the broker's settings let it.

Quotas, turns, streams and jobs are those of the named owner, in place of the client's own. Named
owners have names of their own, so that nobody can name the key or the user of another client.
"""

from __future__ import annotations

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Content, Header, Message, encode

KEY = "owner"  # of a body
NAMED = "for:"  # in front of a name; keys and users have other prefixes
MAX_NAME = 200  # characters


def owner_name(value: object) -> str:
    """The name of an owner. Raises BadRequest unless it is 1 to MAX_NAME printable characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME or not value.isprintable():
        raise BadRequest(f"{KEY} must be 1 to {MAX_NAME} printable characters, got {shown(value)}")
    return value


def encoded_for(
    owner: str, content: Content, id: bytes | None = None, attempt: int = 0
) -> list[bytes]:
    """The parts of a client's message on behalf of an owner; "": of the client itself.

    Raises TooLarge and BadRequest as `encode` does.
    """
    body = content.body()
    if owner:
        body = {**(body or {}), KEY: owner}
    return encode(Header(content.kind, id, attempt=attempt), body, content.blobs())


def take_owner(message: Message) -> str | None:
    """Take the named owner out of a message's body, as the broker writes it; None: none is named.

    Raises BadRequest for what is no name.
    """
    given = message.body.pop(KEY, None)
    return None if given is None else f"{NAMED}{owner_name(given)}"
