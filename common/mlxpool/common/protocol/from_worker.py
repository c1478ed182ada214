"""Messages of workers to the broker. `deltas`: see `deltas`."""

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

TOKENS = "tokens"  # the kind of the answer to a call of the tokenizer
ANSWERS = frozenset({TOKENS, VECTORS, DECISIONS})  # the kinds of a `CallAnswer`


class Hello(Content, Struct, frozen=True):
    """A worker introduces itself. `slot` is "" for one that dials in and asks for a slot.

    `token` is the newest one that the broker gave it; `start_time` is seconds since 1970.
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
        """Read leniently: a wrong type counts as absent."""
        return read(body, cls, lenient=True, token=str(body.get("token")))


class Credit(Content, Struct, frozen=True):
    """Room for more work: `sequences` are free, `works` frames were received in this epoch."""

    kind: ClassVar[str] = "credit"
    sequences: Natural = 0
    works: Natural = 0

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Credit:
        """Read leniently: a wrong type counts as absent."""
        return read(body, cls, lenient=True)


class ProgressSample(Struct, frozen=True):
    """What a worker that dialled in says in place of its progress block."""

    tokens: int = 0  # of the prompt chunk it reads
    fresh: bool = True  # whether a shape of the step is new
    usual_token_ns: int = 0
    usual_step_ns: int = 0

    @classmethod
    def parse(cls, look: object) -> ProgressSample:
        """Four integers; anything else counts as a step of a new shape, which may take long."""
        if isinstance(look, list) and len(look) == 4 and all(isinstance(v, int) for v in look):
            return cls(look[0], bool(look[1]), look[2], look[3])
        return cls()


class Beat(Content, Struct, frozen=True):
    """A heartbeat: what the worker does now and what it holds. Memory is bytes.

    `phase` None: the worker did not say. `prefill` is the request whose prompt it reads.
    `load_progress` is the share of the weights that is loaded, 0 to 1; None: it did not say.
    `load` is what the phases of its load took, also after its end.
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
        """Read leniently: a wrong type counts as absent."""
        look = ProgressSample.parse(body["look"]) if "look" in body else None
        load = LoadTimes.parse(body.get("load_phase"), body.get("load_ms"))
        return read(body, cls, lenient=True, look=look, load=load)


class CallAnswer(Content, Struct, frozen=True):
    """The answer to a call; the body of an error if it has a `code`.

    Its kind is `tokens` for those of the tokenizer, `vectors` or `decisions` for those that a model
    computed.
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
    """A drained worker hands back the runs that it has not finished: (id, run number) each."""

    kind: ClassVar[str] = "yield"
    runs: Sequence[tuple[bytes, int]] = ()

    def body(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Yield:
        """Read leniently: entries that are no [id, run number] are left out."""
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
    """How many tokens prompts have, before they are read: (id, run number, tokens) each."""

    kind: ClassVar[str] = "prompts"
    runs: Sequence[tuple[bytes, int, int]] = ()

    def body(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> PromptSizes:
        """Read leniently: entries that are no [id, run number, tokens] are left out."""
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
    """A worker leaves; `error` is the body of an error, if it cannot serve or no longer can."""

    kind: ClassVar[str] = "bye"
    error: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        return {} if self.error is None else {"error": dict(self.error)}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Bye:
        """Raises BadRequest unless `error` is a map."""
        error = body.get("error")
        if error is None or isinstance(error, Mapping):
            return cls(error)
        raise BadRequest(f"the error of a `bye` must be a map, is {error!r:.40}")
