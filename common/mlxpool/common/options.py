"""Options of a request: sampling and length, and the other keys of a request's message.

`Options` is the table of sampling options: each field declares a type, a check, a default and the
help of its command-line flag. `CHECKS` is made from this table. A test compares the table with
`GenerateOptions`, the type of the Python client's keyword arguments. The defaults are Ollama's, so
that a request has the same meaning in Ollama and here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict, get_type_hints

from msgspec import Struct, field

from mlxpool.common.answer_format import check_format
from mlxpool.common.checks import did_you_mean, is_integer, is_number, shown
from mlxpool.common.errors import BadRequest

MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_SUFFIX_BYTES = 256 * 1024
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000

# A check takes the name and value of an option in a request, and returns the value for `Options`.
# It raises BadRequest naming the option, its value and its bound.
Check = Callable[[str, Any], Any]


class IntegerIn(Struct, frozen=True):
    """Checks an integer from `low` to `high`, both inclusive."""

    low: int
    high: int

    def __call__(self, name: str, value: Any) -> int:
        if not is_integer(value):
            raise BadRequest(f"option {name!r} must be an integer, got {shown(value)}")
        if not self.low <= value <= self.high:
            bounds = f"must be from {self.low} to {self.high}"
            raise BadRequest(f"option {name!r} is {shown(value)}, {bounds}")
        return value


class NumberIn(Struct, frozen=True):
    """Checks a finite number from `low` to `high`, both inclusive; the value is a float."""

    low: float
    high: float

    def __call__(self, name: str, value: Any) -> float:
        if not is_number(value):
            raise BadRequest(f"option {name!r} must be a number, got {shown(value)}")
        if not self.low <= value <= self.high:  # NaN and infinities are out of bounds, too
            bounds = f"must be from {self.low:g} to {self.high:g}"
            raise BadRequest(f"option {name!r} is {shown(value)}, {bounds}")
        return float(value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"option {name!r} must be true or false, got {shown(value)}")
    return value


def _suffix(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"option {name!r} must be text, got {shown(value)}")
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > MAX_SUFFIX_BYTES:
        raise BadRequest(f"option {name!r} has {size} bytes, at most {MAX_SUFFIX_BYTES}")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
        raise BadRequest(f"option {name!r} must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"option {name!r} has {len(stops)} strings, at most {MAX_STOPS}")
    for stop in stops:
        size = len(stop.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_STOP_BYTES:
            raise BadRequest(
                f"option {name!r} has a string of {size} bytes, must be 1 to {MAX_STOP_BYTES}"
            )
    return tuple(stops)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise BadRequest(f"option {name!r} must be a map of token id to number")
    if len(value) > MAX_BIASES:
        raise BadRequest(f"option {name!r} has {len(value)} entries, at most {MAX_BIASES}")
    amount = NumberIn(-MAX_BIAS, MAX_BIAS)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        digits = str(token)
        if not re.fullmatch("[0-9]{1,10}", digits) or int(digits) > MAX_COUNT:
            raise BadRequest(f"option {name!r} has the key {shown(token)}, which is no token id")
        biases[int(digits)] = amount(f"{name}[{digits}]", bias)
    return biases


class Options(Struct, frozen=True):
    """Checked options of one request; build them with `Options.parse`.

    The annotation of a field has its type, its check, and the help text of its command-line flag if
    there is a flag.
    """

    max_tokens: Annotated[
        int,
        IntegerIn(-(2**31), MAX_COUNT),
        "greatest number of tokens to generate, 0: up to the context (default: as set)",
    ] = -1  # below 0: the setting default_max_tokens; if that is 0, up to the context
    temperature: Annotated[
        float, NumberIn(0, 100), "randomness of the choice of tokens, 0: greedy (default 0.8)"
    ] = 0.8
    top_p: Annotated[
        float,
        NumberIn(0, 1),
        "keep the most likely tokens up to this total probability (default 0.9)",
    ] = 0.9  # 1 (or 0) is off
    top_k: Annotated[
        int,
        IntegerIn(0, MAX_COUNT),
        "keep this many of the most likely tokens, 0: all (default 40)",
    ] = 40
    min_p: Annotated[
        float,
        NumberIn(0, 1),
        "drop tokens below this share of the greatest probability (default 0)",
    ] = 0.0  # 0 is off
    repeat_penalty: Annotated[
        float, NumberIn(0.01, 100), "divide the logits of recent tokens by this (default 1, off)"
    ] = 1.0
    repeat_last_n: Annotated[
        int, IntegerIn(-1, MAX_COUNT), "number of last tokens that are recent, -1: all (default 64)"
    ] = 64  # -1: the context, 0: none
    presence_penalty: Annotated[
        float,
        NumberIn(-100, 100),
        "subtract this from the logits of recent tokens (default 0)",
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        NumberIn(-100, 100),
        "subtract this from the logit of a recent token for each occurrence (default 0)",
    ] = 0.0
    logit_bias: Annotated[Mapping[int, float], _biases] = field(default_factory=dict)
    seed: Annotated[
        int,
        IntegerIn(-1, MAX_SEED),
        "seed of the random choices: the same seed gives the same text (default: drawn)",
    ] = -1  # below 0: the broker draws a seed
    stop: Annotated[
        tuple[str, ...], _stops, "end the output before this text; may be repeated"
    ] = ()
    logprobs: Annotated[bool, _boolean, "report each token's log-probability, with --json"] = False
    top_logprobs: Annotated[
        int,
        IntegerIn(0, MAX_TOP_LOGPROBS),
        "number of alternatives reported with --json (default 0)",
    ] = 0
    ignore_eos: Annotated[bool, _boolean, "continue after the model's end token"] = False
    truncate: Annotated[
        bool, _boolean, "cut a prompt that is too long, after its first num_keep tokens"
    ] = False
    shift: Annotated[
        bool, _boolean, "if the context is full, discard tokens after the first num_keep"
    ] = False
    num_keep: Annotated[
        int,
        IntegerIn(-1, MAX_COUNT),
        "number of first tokens that --truncate and --shift keep, -1: the prompt (default 4)",
    ] = 4
    num_ctx: Annotated[
        int, IntegerIn(0, MAX_COUNT), "length of this request's context (default, 0: the model's)"
    ] = 0
    format: Annotated[Mapping[str, Any] | None, check_format] = None  # the form of the answer
    thinking_budget: Annotated[
        int,
        IntegerIn(-1, MAX_COUNT),
        "greatest number of tokens of thoughts before the answer (default, -1: no bound)",
    ] = -1
    # The answer continues the last message, which is of the role assistant.
    continue_message: Annotated[bool, _boolean] = False
    suffix: Annotated[str, _suffix] = ""  # the text after the gap that the answer fills
    # Control tokens in contents of messages are plain text; None: as set for the model.
    plain_contents: Annotated[bool | None, _boolean] = None
    echo: Annotated[bool, _boolean] = False  # the output begins with the prompt's text
    # Alternatives for each token of the prompt; -1: no log-probabilities; None: top_logprobs if
    # echo and logprobs are set, otherwise -1.
    prompt_logprobs: Annotated[int | None, IntegerIn(-1, MAX_TOP_LOGPROBS)] = None

    @property
    def reports_prompt(self) -> bool:
        """True if the tokens of the prompt are reported."""
        return self.echo or self.prompt_alternatives >= 0

    @property
    def prompt_alternatives(self) -> int:
        """The number of alternatives that are reported for each token of the prompt.

        It is -1 if the tokens of the prompt are reported without log-probabilities, or not at all.
        """
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return self.top_logprobs if self.echo and self.logprobs else -1

    @property
    def prompt_only(self) -> bool:
        """True if the prompt is reported and no token is generated, because max_tokens is 0."""
        return self.reports_prompt and self.max_tokens == 0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Returns the options of a message's map. An option has precedence over its alias.

        Raises BadRequest naming the option, its value and its bound.
        """
        values: dict[str, Any] = {}
        aliased: dict[str, Any] = {}
        for name, value in raw.items():
            target = ALIASES.get(name, name)
            check = CHECKS.get(target)
            if check is None:
                raise BadRequest(f"unknown option {name!r}{_nearest(name)}")
            if value is not None:
                (values if target == name else aliased)[target] = check(name, value)
        options = cls(**{**aliased, **values})
        if options.format is not None and options.ignore_eos:
            raise BadRequest(
                "option 'ignore_eos' cannot be combined with 'format': an answer ends where the"
                " format is complete"
            )
        return options

    def to_wire(self) -> dict[str, Any]:
        """Returns a map that `parse` reads as an equal object."""
        # dataclasses.asdict also copies the values, which takes ten times as long.
        wire = {name: getattr(self, name) for name in _DECLARED}
        wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        wire["stop"] = list(self.stop)
        return wire


_DECLARED = get_type_hints(Options, include_extras=True)
CHECKS: dict[str, Check] = {name: hint.__metadata__[0] for name, hint in _DECLARED.items()}
FLAGS: dict[str, tuple[Any, str]] = {  # option -> its type, and the help of its command-line flag
    name: (hint.__origin__, hint.__metadata__[1])
    for name, hint in _DECLARED.items()
    if len(hint.__metadata__) > 1
}
ALIASES = {"num_predict": "max_tokens"}
REQUEST_KEYS = (  # other keys of the message, which are also keywords of the Python client
    "deadline_ms",
    "queue_ms",
    "first_token_ms",
    "priority",
    "window",
    "batch",
    "durable",
    "session",
    "tools",
    "think",
    "traceparent",
)


def _nearest(name: object) -> str:
    """Returns the hint at the end of the error for an unknown option."""
    if name in REQUEST_KEYS:
        return "; it is a key of the request, beside its options"
    if name in ("n", "best_of"):
        return "; send a request for each completion, with seed + i and the key `choice`"
    hint = did_you_mean(str(name), [*CHECKS, *ALIASES, *REQUEST_KEYS])
    known = f"; known options: {', '.join(CHECKS)}; beside options: {', '.join(REQUEST_KEYS)}"
    return hint or known


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; None is the same as absent."""

    max_tokens: int | None  # tokens of the whole completion; 0: up to the context
    num_predict: int | None  # another name of max_tokens; max_tokens has precedence
    temperature: float | None  # 0 is greedy
    top_p: float | None  # keep the most likely tokens of this total probability; 1 or 0: off
    top_k: int | None  # sample from this many most likely tokens; 0: off
    min_p: float | None  # drop tokens below this fraction of the first token's probability; 0: off
    repeat_penalty: float | None  # divides the logits of recent tokens; 1: off
    repeat_last_n: int | None  # number of recent tokens for penalties; -1: the context, 0: none
    presence_penalty: float | None  # subtracted once from the logits of recent tokens
    frequency_penalty: float | None  # subtracted for each occurrence among the recent tokens
    logit_bias: Mapping[int, float] | Mapping[str, float] | None  # added to logits, by token id
    seed: int | None  # below 0: the broker draws a seed
    stop: str | Sequence[str] | None  # text that ends the completion and is not sent
    logprobs: bool | None  # report each token's log-probability
    top_logprobs: int | None  # alternatives reported for each token, with logprobs
    ignore_eos: bool | None  # continue after the model's end-of-sequence token
    truncate: bool | None  # cut a prompt that is too long; false: refuse it
    shift: bool | None  # at a full context drop tokens after the first `num_keep`, and continue
    num_keep: int | None  # number of first tokens that truncate and shift keep; -1: the prompt
    num_ctx: int | None  # context of this request; 0: the model's context, which is the bound
    format: Mapping[str, Any] | None  # the form of the answer, see docs/structured-output.md
    thinking_budget: int | None  # the most tokens of thinking; -1: no bound
    continue_message: bool | None  # continue the last message, which is of the role assistant
    suffix: str | None  # the text after the gap that the answer fills; with prompt
    plain_contents: bool | None  # control tokens in contents of messages are text
    echo: bool | None  # begin the output with the prompt and its tokens; see docs/choices.md
    prompt_logprobs: int | None  # report the prompt's tokens with this many alternatives; -1: off
    deadline_ms: int | None  # milliseconds from acceptance to the end of the stream
    queue_ms: int | None  # milliseconds until a worker takes the request
    first_token_ms: int | None  # milliseconds to the first token
    priority: int | None  # 0 to 2; 2 is the most urgent
    window: int | None  # the most token ids that may be sent before an ack
    batch: bool | None  # one frame per step for all streams of the client; default true
    durable: bool | None  # false: the loss of a worker or a connection ends the stream
    session: str | None  # prefer the worker of the session's last request
    tools: Sequence[Mapping[str, Any]] | None  # tools that the template offers to the model
    traceparent: str | None  # the W3C header traceparent: the span of the request
    think: bool | str | None  # thinking: True, False, or its effort ("low", "medium", "high")
