"""Owners that clients name in messages."""

from __future__ import annotations

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.from_client import Cancel, ListModels
from mlxpool.common.protocol.owners import MAX_NAME, encoded_for, owner_name, take_owner

ID = bytes(range(16))


def test_a_message_names_its_owner_once() -> None:
    message = frames.decode(encoded_for("ann", Cancel(), ID, 3))
    assert (message.kind, message.header.id, message.header.attempt) == ("cancel", ID, 3)
    assert take_owner(message) == "for:ann"
    assert message.body == {} and take_owner(message) is None


def test_a_message_of_the_client_itself_is_as_it_was() -> None:
    assert encoded_for("", ListModels(), ID) == frames.encoded(ListModels(), ID)
    assert take_owner(frames.decode(encoded_for("", Cancel(), ID))) is None


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\nb", 7, b"ann", ["ann"]])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(BadRequest, match="owner must be"):
        owner_name(name)
    message = frames.decode(frames.encode(frames.Header("cancel", ID), {"owner": name}))
    with pytest.raises(BadRequest, match="owner must be"):
        take_owner(message)
