"""The fields of requests about files and batches, with their schemas."""

from __future__ import annotations

from mlxpool.common.web_targets import MAX_URL
from mlxpool.gateway.description.schemas import NAME, TEXT, Schema, choice, described, integer
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.generation.queries import page_fields
from mlxpool.gateway.openai.responses_api.fields import METADATA

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
CLASSIFY, DECISIONS = "/v1/classify", "/v1/decisions"
CALLS = (EMBEDDINGS, RERANK, SCORE, CLASSIFY, DECISIONS)  # calls whose answers are numbers
ENDPOINTS = (CHATS, COMPLETIONS, RESPONSES, *CALLS)
MAX_FILE = 200 * 1024 * 1024  # most bytes of an upload
MAX_FILES = 10_000  # most files in a page of a list
MAX_LINES = 50_000  # most lines of a batch
# Most bytes of a client's line. A line of the pool has at most half, because it has no escapes.
MAX_LINE = 8 * 2**20
MAX_KEEP = 30 * 24 * 3600  # most seconds until a file or a result expires
MIN_KEEP = 3600
WINDOW = r"^[1-9][0-9]{0,2}[hd]$"
URL: Schema = {"type": "string", "maxLength": MAX_URL, "pattern": "^https?://"}
EXPIRY = Body(
    {"anchor": choice("created_at"), "seconds": integer(MIN_KEEP, MAX_KEEP)},
    required=("anchor", "seconds"),
)
FORM = Body({"file": NAME, "purpose": choice("batch"), "expires_after": EXPIRY.schema()})
BATCH = Body(
    {
        "input_file_id": NAME,
        "endpoint": described("of each line", choice(*ENDPOINTS)),
        "completion_window": described(
            "hours or days: 24h, 7d", {"type": "string", "pattern": WINDOW}
        ),
        "metadata": METADATA,
        "output_expires_after": EXPIRY.schema(),
        "notify": described("the URL that receives the end of the batch", URL),
    },
    required=("input_file_id", "endpoint", "completion_window"),
)
FILES = Body({**page_fields(MAX_FILES), "purpose": TEXT})
BATCHES = Body({"limit": integer(1, 100), "after": TEXT})
