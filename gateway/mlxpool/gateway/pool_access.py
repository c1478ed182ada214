"""What the routes share: the gateway's settings, its connection to the pool, the list of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.formats import ChatFormats, template_messages
from mlxpool.gateway.generation import ChoiceRequest, Generation
from mlxpool.gateway.models import ModelList
from mlxpool.gateway.settings import Settings


class PoolAccess:
    """One connection to the pool for all requests."""

    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        self.settings = settings
        self.client = client
        self.models = ModelList(client)

    def generate(self, requests: Sequence[ChoiceRequest]) -> Generation:
        """Start the streams of a request. Raises HttpError."""
        try:
            return Generation(self.client, requests)
        except PoolError as error:
            raise errors.from_pool_error(error) from error

    def stream_arguments(self, arguments: Mapping[str, Any], chat: ChatFormats) -> dict[str, Any]:
        """The arguments with the gateway's deadline, and messages in the template's form."""
        found = dict(arguments)
        if self.settings.deadline is not None:
            found["deadline_ms"] = max(1, round(self.settings.deadline * 1000))
        if "messages" in found:
            found["messages"] = template_messages(chat, found["messages"])
        return found
