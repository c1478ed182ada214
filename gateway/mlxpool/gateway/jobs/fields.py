"""The fields of requests about jobs, with their schemas."""

from __future__ import annotations

from mlxpool.common.options import CHECKS, MAX_DEADLINE_MS
from mlxpool.common.protocol.chat import LEVELS, MAX_MESSAGES, MAX_TOOLS
from mlxpool.common.protocol.decisions import MAX_QUESTIONS
from mlxpool.common.protocol.encoder_calls import MAX_INPUTS
from mlxpool.common.protocol.from_client import MAX_PRIORITY
from mlxpool.common.protocol.images import MAX_IMAGES
from mlxpool.common.protocol.kept.job_messages import IDLE, JOB_STATES, MAX_KEEP_MS, MAX_LISTED
from mlxpool.common.protocol.kept.job_work import KIND, KINDS
from mlxpool.common.protocol.resume import MAX_TIME
from mlxpool.gateway.description.schemas import (
    FLAG,
    MAP,
    NAME,
    TEXT,
    TOKEN_IDS,
    Schema,
    choice,
    described,
    integer,
    listed,
    one_of,
    option,
)
from mlxpool.gateway.field_checks import Body

MAX_NUMBER = 2**53  # of a job, of an end, of an id
MAX_POOLS = 1000  # behind one gateway
MAX_KEY = 256  # characters
OPTIONS = Body({name: MAP if name == "format" else option(name) for name in CHECKS})
IN_OPTIONS = {name: f"options.{name}" for name in CHECKS}
_KEEP: Schema = {"type": "number", "minimum": 0, "maximum": MAX_KEEP_MS / 1000}
_TIME: Schema = {"type": "number", "minimum": 0, "maximum": MAX_TIME}
_KEY: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_KEY}
JOB = Body(
    {
        "model": described("a name of /v1/models", NAME),
        "prompt": described("text; one of prompt, messages and tokens", TEXT),
        "messages": listed(MAP, 1, MAX_MESSAGES),
        "tokens": described(
            "of a call also a list of such lists",
            one_of(TOKEN_IDS, listed(TOKEN_IDS, 1, MAX_INPUTS)),
        ),
        "images": described("files in base64", listed(TEXT, 0, MAX_IMAGES)),
        "tools": listed(MAP, 0, MAX_TOOLS),
        "think": one_of(FLAG, choice(*LEVELS)),
        "options": described("the pool's options (docs/protocol.md, `generate`)", OPTIONS.schema()),
        "session": TEXT,
        "key": described("names the job; absent: Idempotency-Key, or a drawn one", _KEY),
        "keep": described("seconds for which the result is kept", _KEEP),
        "not_before": described("seconds since 1970", _TIME),
        "notify": described("the URL to which its end is posted", TEXT),
        "priority": integer(IDLE, MAX_PRIORITY),
        "deadline_ms": integer(1, MAX_DEADLINE_MS),
        KIND: described("absent: generate; of a call (docs/protocol.md) its keys", choice(*KINDS)),
        "inputs": one_of(TEXT, listed({}, 1, MAX_INPUTS)),
        "documents": listed(TEXT, 1, MAX_INPUTS),
        "query": TEXT,
        "questions": listed(MAP, 1, MAX_QUESTIONS),
        "temperature": {"type": "number"},
        "truncate": FLAG,
        "dimensions": integer(1),
        "normalise": FLAG,
        "prompt_name": TEXT,
    },
    required=("model",),
)
OF_CALLS = frozenset(
    {"inputs", "documents", "query", "questions", "temperature", "truncate", "dimensions"}
    | {"normalise", "prompt_name"}
)  # which a `generate` has not
LISTED = Body(  # the query of GET /v1/jobs
    {
        "state": choice(*JOB_STATES),
        "after": described("the `end_seq` behind which ended jobs are listed", integer(0)),
        "before": described("the `seq` before which jobs are listed, newest first", integer(0)),
        "limit": integer(1, MAX_LISTED),
        "pool": described("of several pools: its number, from 1", integer(1, MAX_POOLS)),
    }
)
EVENTS = Body(  # the query of GET /v1/jobs/ID/events
    {
        "from": described("the index of the first id", integer(0)),
        "gen": described("the generation that the ids before it are of", integer(0)),
    }
)
