"""Messages of workers to the broker, except `deltas`, which has its own module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field
from msgspec.structs import asdict, astuple

from mlxpool.common.errors import BadRequest
from mlxpool.common.load_times import LoadTimes
from mlxpool.common.protocol.decisions import DECISIONS
from mlxpool.common.protocol.encoder_calls import VECTORS
from mlxpool.common.protocol.frames import Content
from mlxpool.common.records import Natural, read

TOKENS = "tokens"  # the kind of the tokenizer's answer to a call
ANSWERS = frozenset({TOKENS, VECTORS, DECISIONS})  # the kinds of a `CallAnswer`


class Hello(Content, Struct, frozen=True):
    """A worker introduces itself.

    `slot` is "" if the broker did not start the worker, which then asks for a slot. `token` is the
    newest token that the broker sent to this worker. `start_time` is in seconds since 1970.
    """

    kind: ClassVar[str] = "hello"
    slot: str = ""
    model: str | None = None
    token: str = ""
    pid: Natural = 0
    start_time: float = 0.0
    host: str | None = None
    digest: str = ""
    context: Natural = 0

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Hello:
        """Reads a body; a value of a wrong type counts as absent."""
        return read(body, cls, lenient=True, token=str(body.get("token")))


class Credit(Content, Struct, frozen=True):
    """The number of further `sequences` for which a worker has room.

    `works` is the number of `work` messages that the worker has received in this epoch.
    """

    kind: ClassVar[str] = "credit"
    sequences: Natural = 0
    works: Natural = 0

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Credit:
        """Reads a body; a value of a wrong type counts as absent."""
        return read(body, cls, lenient=True)


class ProgressSample(Struct, frozen=True):
    """The progress of a worker that connects over tcp; other workers have a progress block."""

    tokens: int = 0  # tokens of the running prefill chunk
    fresh: bool = True  # True if the step has a new shape
    usual_token_ns: int = 0
    usual_step_ns: int = 0

    @classmethod
    def parse(cls, look: object) -> ProgressSample:
        """Reads a list of four integers; any other value gives the defaults.

        The default of `fresh` is True: the worker may compute a new shape, which can take long.
        """
        if isinstance(look, list) and len(look) == 4 and all(isinstance(v, int) for v in look):
            return cls(look[0], bool(look[1]), look[2], look[3])
        return cls()


class Beat(Content, Struct, frozen=True):
    """A heartbeat: the worker's activity, its runs and its memory in bytes.

    `phase` and `load_progress` are None if the worker did not send them. `prefill` is the id of the
    request whose prompt the worker reads. `load_progress` is the loaded fraction of the weights, 0
    to 1. `load` has the durations of the phases of the load, also after the load has ended.
    """

    kind: ClassVar[str] = "beat"
    phase: str | None = None
    phase_age_ms: float = 0
    progress: Natural = 0
    prefill: bytes | None = None
    step_ms: float = 0
    running: Natural = 0
    waiting: Natural = 0
    layout: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)
    prefix: Mapping[str, Any] = field(default_factory=dict)
    look: ProgressSample | None = None
    load_progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    speculation: Mapping[str, Any] = field(default_factory=dict)
    load: LoadTimes = field(default_factory=LoadTimes)

    def body(self) -> dict[str, Any]:
        body = {**asdict(self), "load_phase": self.load.now, "load_ms": self.load.milliseconds}
        del body["load"], body["look"]
        return body if self.look is None else {**body, "look": astuple(self.look)}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Beat:
        """Reads a body; a value of a wrong type counts as absent."""
        look = ProgressSample.parse(body["look"]) if "look" in body else None
        load = LoadTimes.parse(body.get("load_phase"), body.get("load_ms"))
        return read(body, cls, lenient=True, look=look, load=load)


class CallAnswer(Content, Struct, frozen=True):
    """The answer to a call. `fields` are the body of an error if they contain a `code`.

    The kind is `tokens` if the tokenizer has computed the answer, and `vectors` or `decisions` if
    the model has.
    """

    fields: Mapping[str, Any]
    packed: tuple[bytes, ...] = ()
    kind: str = TOKENS  # type: ignore[misc]  # one record for several kinds

    @property
    def failed(self) -> bool:
        return "code" in self.fields

    def body(self) -> dict[str, Any]:
        return dict(self.fields)

    def blobs(self) -> tuple[bytes, ...]:
        return self.packed


class Yield(Content, Struct, frozen=True):
    """A drained worker returns its unfinished runs, each as (id, run number)."""

    kind: ClassVar[str] = "yield"
    runs: Sequence[tuple[bytes, int]] = ()

    def body(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Yield:
        """Reads a body; leaves out entries of another form than [id, run number]."""
        runs = body.get("runs")
        pairs = runs if isinstance(runs, list) else []
        return cls(
            [
                (pair[0], pair[1])
                for pair in pairs
                if isinstance(pair, list)
                and len(pair) == 2
                and isinstance(pair[0], bytes)
                and isinstance(pair[1], int)
            ]
        )


class PromptSizes(Content, Struct, frozen=True):
    """The token counts of prompts before their prefill: (id, run number, tokens) each."""

    kind: ClassVar[str] = "prompts"
    runs: Sequence[tuple[bytes, int, int]] = ()

    def body(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> PromptSizes:
        """Reads a body; leaves out entries of another form than [id, run number, tokens]."""
        runs = body.get("runs")
        return cls([tuple(run) for run in runs if _is_size(run)] if isinstance(runs, list) else [])


def _is_size(run: object) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 3
        and isinstance(run[0], bytes)
        and all(type(number) is int and number >= 0 for number in run[1:])
    )


class Bye(Content, Struct, frozen=True):
    """A worker leaves the pool. `error` is the body of an error if the worker cannot serve."""

    kind: ClassVar[str] = "bye"
    error: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        return {} if self.error is None else {"error": dict(self.error)}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Bye:
        """Reads a body. Raises BadRequest unless `error` is a map."""
        error = body.get("error")
        if error is None or isinstance(error, Mapping):
            return cls(error)
        raise BadRequest(f"the error of a `bye` must be a map, is {error!r:.40}")
