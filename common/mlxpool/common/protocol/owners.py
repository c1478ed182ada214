"""Named owners: a client may send requests on behalf of an owner, if the broker's settings allow
it.

The quotas, fair queueing, streams and jobs are then those of the named owner, not of the client.
Names of owners get a prefix, so that no client can name the key or the user of another client.
"""

from __future__ import annotations

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Content, Header, Message, encode

KEY = "owner"  # the key of the owner in a body
NAMED = "for:"  # prefix of a named owner; keys and users have other prefixes
MAX_NAME = 200  # characters


def owner_name(value: object) -> str:
    """Returns a name. Raises BadRequest unless it has 1 to MAX_NAME printable characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME or not value.isprintable():
        raise BadRequest(f"{KEY} must be 1 to {MAX_NAME} printable characters, got {shown(value)}")
    return value


def encoded_for(
    owner: str, content: Content, id: bytes | None = None, attempt: int = 0
) -> list[bytes]:
    """Returns the parts of a client's message on behalf of an owner.

    If `owner` is "", the message is on behalf of the client itself. Raises the errors of `encode`.
    """
    body = content.body()
    if owner:
        body = {**(body or {}), KEY: owner}
    return encode(Header(content.kind, id, attempt=attempt), body, content.blobs())


def take_owner(message: Message) -> str | None:
    """Takes the named owner out of a message's body, and returns it with its prefix.

    Returns None if the body names no owner. Raises BadRequest if the value is not a name.
    """
    name = message.body.pop(KEY, None)
    return None if name is None else f"{NAMED}{owner_name(name)}"
