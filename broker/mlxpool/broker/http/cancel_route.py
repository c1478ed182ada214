"""`POST /cancel`: an operator cancels a request on the status page."""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

from mlxpool.broker.http.operator_route import LoopRoute
from mlxpool.common.errors import BadRequest

log = logging.getLogger("mlxpool.broker")

PREFIX = re.compile(r"[0-9a-f]{8,32}")  # of a request's id


class CancelRoute(LoopRoute[str]):
    """What is asked is the beginning of a request's id."""

    path: ClassVar[str] = "/cancel"
    max_body: ClassVar[int] = 256

    def parse(self, asked: dict[str, Any], peer: str) -> str:
        prefix = asked.get("id")
        if not isinstance(prefix, str) or not PREFIX.fullmatch(prefix):
            raise BadRequest(
                'the body must be {"id": "…"} with 8 to 32 hexadecimal digits of a request\'s id'
            )
        log.info("cancel asked on the status page", extra={"id": prefix, "address": peer})
        return prefix
