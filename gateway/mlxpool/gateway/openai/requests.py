"""Requests of OpenAI's /v1/chat/completions and /v1/completions: tables of fields, and checks.

docs/gateway.md documents the same fields for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.options import MAX_COUNT, MAX_SEED, MAX_TOP_LOGPROBS
from mlxpool.common.protocol.chat import LEVELS, check_messages, check_tools
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request, unsupported_parameter
from mlxpool.gateway.field_checks import NO_CONSTRAINTS, RefusedFields
from mlxpool.gateway.images import take_image_urls

MAX_CHOICES = 32  # streams of one request
DEFAULT_MAX_TOKENS = 16  # of /v1/completions

# OpenAI's defaults where they differ from the pool's.
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repeat_last_n": -1,
}
# field -> option of the pool
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop": "stop",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "ignore_eos": "ignore_eos",
    "truncate": "truncate",
    "shift": "shift",
    "num_keep": "num_keep",
    "num_ctx": "num_ctx",
}
ACCEPTED = frozenset({"user", "metadata", "safety_identifier", "service_tier"})
COMMON = frozenset(
    {"model", "n", "stream", "stream_options", "max_tokens", "logprobs", "prompt_cache_key"}
)
CHAT = COMMON | {
    "messages",
    "tools",
    "tool_choice",
    "top_logprobs",
    "max_completion_tokens",
    "reasoning_effort",
    "chat_template_kwargs",
}
COMPLETION = COMMON | {"prompt"}

REFUSED: RefusedFields = {
    "store": ((False,), "nothing is kept; leave it out"),
    "min_tokens": ((0,), "leave it out"),
    "stop_token_ids": (([],), "name texts in `stop`"),
    "guided_json": ((), NO_CONSTRAINTS),
    "guided_regex": ((), NO_CONSTRAINTS),
    "guided_choice": ((), NO_CONSTRAINTS),
    "truncate_prompt_tokens": ((), "use `truncate`, with `num_keep` and `num_ctx`"),
    "skip_special_tokens": ((), "special tokens are text like any other"),
    "use_beam_search": ((False,), "leave it out"),
    "length_penalty": ((1.0, 1), "leave it out"),
    "priority": ((0,), "leave it out"),
}
CHAT_REFUSED: RefusedFields = {
    **REFUSED,
    "response_format": (
        ({"type": "text"},),
        "constrained decoding is not built; ask for the form in the messages",
    ),
    "parallel_tool_calls": ((True,), "how many tools are called is left to the model"),
    "functions": (([],), "use `tools`"),
    "function_call": (("none",), "use `tools`"),
    "modalities": ((["text"],), "models give text only"),
    "audio": ((), "models take text and images, and give text"),
    "prediction": ((), "leave it out"),
    "verbosity": (("medium",), "ask for it in the messages"),
    "web_search_options": ((), "there is no web search; offer a tool of your own"),
    "prompt": ((), "this is /v1/chat/completions: use `messages`"),
    "chat_template": ((), "the template is the model's own"),
    "add_generation_prompt": ((True,), "leave it out"),
}
COMPLETION_REFUSED: RefusedFields = {
    **REFUSED,
    "echo": ((False,), "the prompt is not repeated"),
    "suffix": (("",), "models complete the end of a text only"),
    "best_of": ((1,), "use `n`"),
    "messages": ((), "this is /v1/completions: use `prompt`"),
    "tools": (([],), "use /v1/chat/completions"),
}
NO_FORCED_CALL = (
    "a call cannot be forced, as constrained decoding is not built; use 'auto' or 'none'"
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request. `prompts`: the prompt arguments of the client's `stream`, one each."""

    model: str
    prompts: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    choices: int  # of each prompt
    stream: bool
    usage: bool  # the stream ends with usage
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return "logprobs" in self.options

    @property
    def thinks(self) -> bool:
        """Whether the request asks for thoughts."""
        return bool(self.options.get("think"))

    def arguments(self) -> list[dict[str, Any]]:
        """The arguments of each choice, prompt by prompt; choice i of a prompt gets seed + i."""
        every = []
        for prompt in self.prompts:
            for number in range(self.choices):
                options = dict(self.options)
                if "seed" in options:
                    options["seed"] += number
                every.append({**prompt, **options})
        return every


def chat(body: Mapping[str, Any]) -> CompletionRequest:
    """A checked /v1/chat/completions. Raises HttpError naming the field."""
    fields.check_names(body, {*CHAT, *SAMPLING}, ACCEPTED, CHAT_REFUSED)
    given, images = take_image_urls(body.get("messages"))
    messages = fields.checked("messages", check_messages, given)
    tools = _tools(body)
    options = _options(body)
    max_tokens = fields.integer(body, "max_completion_tokens", 1, MAX_COUNT)
    if max_tokens is not None and options.setdefault("max_tokens", max_tokens) != max_tokens:
        raise bad_request(
            "'max_tokens' and 'max_completion_tokens' differ", "max_completion_tokens"
        )
    options |= fields.logprob_options(body)
    think = _think(body)
    options |= {} if think is None else {"think": think}
    options |= {"tools": tools} if tools else {}
    prompt = {"messages": messages, **({"images": images} if images else {})}
    return _request(body, [prompt], options, tools)


def completion(body: Mapping[str, Any]) -> CompletionRequest:
    """A checked /v1/completions. Raises HttpError naming the field."""
    fields.check_names(body, {*COMPLETION, *SAMPLING}, ACCEPTED, COMPLETION_REFUSED)
    options = {"max_tokens": DEFAULT_MAX_TOKENS, **_options(body)}
    top = fields.integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None:
        options |= {"logprobs": True, "top_logprobs": top}
    return _request(body, _prompts(body.get("prompt")), options, ())


def _request(
    body: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
) -> CompletionRequest:
    choices = fields.integer(body, "n", 1, MAX_CHOICES) or 1
    if len(prompts) * choices > MAX_CHOICES:
        message = (
            f"{len(prompts)} prompts with {choices} choices each, at most {MAX_CHOICES} in all"
        )
        raise bad_request(message, "n")
    if options.get("seed", 0) > MAX_SEED - (choices - 1):
        raise bad_request(f"'seed' is {options['seed']}: choice {choices} has none", "seed")
    stream = fields.flag(body, "stream", False)
    return CompletionRequest(
        fields.text(body, "model"),
        prompts,
        options,
        choices,
        stream,
        _usage(body, stream),
        tools,
    )


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {**body, "top_k": 0} if body.get("top_k") == -1 else body
    options = {**DEFAULTS, **fields.options(given, SAMPLING)}
    if options.get("seed", 0) < 0:
        raise bad_request(f"'seed' is {options['seed']}, must not be negative", "seed")
    max_tokens = fields.integer(body, "max_tokens", 1, MAX_COUNT)
    options |= {} if max_tokens is None else {"max_tokens": max_tokens}
    session = fields.text(body, "prompt_cache_key", "")
    if len(session) > 256:
        message = f"'prompt_cache_key' has {len(session)} characters, at most 256 are allowed"
        raise bad_request(message, "prompt_cache_key")
    return {**options, "session": session} if session else options


def _usage(body: Mapping[str, Any], stream: bool) -> bool:
    given = fields.mapping(body, "stream_options")
    if given and not stream:
        raise bad_request("'stream_options' goes with 'stream': true", "stream_options")
    prefix = "stream_options."
    refused = {"continuous_usage_stats": ((False,), "usage comes at the end")}
    fields.check_names(given, {"include_usage"}, {"include_obfuscation"}, refused, prefix)
    return fields.flag(given, "include_usage", False, prefix)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = fields.checked("tools", check_tools, body.get("tools"))
    for number, tool in enumerate(tools):
        if tool.get("type") != "function" or "function" not in tool:
            raise bad_request(f"tools[{number}] must be {{type: 'function', function: …}}", "tools")
        if tool["function"].get("strict"):
            raise unsupported_parameter(f"tools[{number}].function.strict", "leave it out")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise unsupported_parameter("tool_choice", NO_FORCED_CALL)
    return [] if choice == "none" else tools


def _think(body: Mapping[str, Any]) -> bool | str | None:
    """The pool's `think`, from `reasoning_effort` or vLLM's `chat_template_kwargs`."""
    effort = body.get("reasoning_effort")
    if effort == "none":
        return False
    if effort is not None:
        if effort not in LEVELS:
            message = f"'reasoning_effort' is {shown(effort)}, must be none, {', '.join(LEVELS)}"
            raise bad_request(message, "reasoning_effort")
        return str(effort)
    given = fields.mapping(body, "chat_template_kwargs")
    prefix = "chat_template_kwargs."
    fields.check_names(given, {"enable_thinking"}, (), {}, prefix)
    if given.get("enable_thinking") is None:
        return None
    return fields.flag(given, "enable_thinking", True, prefix)


def _prompts(given: object) -> list[dict[str, Any]]:
    """The prompts of a text, a list of token ids, or a list of either."""
    every = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not every:
        raise bad_request("'prompt' must not be empty", "prompt")
    return [_prompt(one) for one in every]


def _prompt(given: object) -> dict[str, Any]:
    if isinstance(given, str) and given:
        return {"prompt": given}
    if isinstance(given, list) and _is_ids(given):
        return {"tokens": given}
    raise bad_request(
        "'prompt' must be text, a list of token ids, or a list of these, none of them empty;"
        f" got {shown(given)}",
        "prompt",
    )


def _is_ids(given: list[Any]) -> bool:
    return bool(given) and all(type(one) is int and 0 <= one < 2**32 for one in given)
