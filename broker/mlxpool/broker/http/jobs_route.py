"""`POST /jobs`: an operator looks at jobs on the status page, and changes one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from mlxpool.broker.http.loop_queue import Fate
from mlxpool.broker.http.operator_route import LoopRoute
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.kept import job_messages, job_operations
from mlxpool.common.protocol.kept.json_form import IDS, as_json

log = logging.getLogger("mlxpool.broker")

OF_SOCKET = {job_operations.BATCHES, job_operations.EXPORT, job_operations.VERIFY}
KINDS = job_operations.KINDS - OF_SOCKET
ID = re.compile(r"[0-9a-f]{32}")

Question = tuple[str, Mapping[str, Any]]  # the kind of a question of job_operations, and its body


class JobsRoute(LoopRoute[Question]):
    """A body is {"ask": KIND} with the keys of that question; ids are hexadecimal digits."""

    path: ClassVar[str] = "/jobs"
    max_body: ClassVar[int] = 4096

    def parse(self, asked: dict[str, Any], peer: str) -> Question:
        kind = asked.pop("ask", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise BadRequest(f"ask must be one of {', '.join(sorted(KINDS))}")
        for name in IDS:
            if name in asked:
                asked[name] = _id(name, asked[name])
        job_operations.parse_question(kind, asked)  # what is wrong is told before the loop is woken
        if kind in job_operations.CHANGING or kind == job_messages.READ:
            job = asked.get("job")
            shown = job.hex() if isinstance(job, bytes) else repr(asked.get("key"))[:80]
            extra = {"command": kind, "job": shown, "address": peer}
            log.info("jobs asked on the status page", extra=extra)
        return kind, asked

    def shown(self, fate: Fate) -> Any:
        return as_json(fate)


def _id(name: str, value: object) -> bytes:
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise BadRequest(f"{name} must be 32 hexadecimal digits")
    return bytes.fromhex(value)
