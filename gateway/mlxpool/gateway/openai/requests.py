"""Requests of OpenAI's /v1/chat/completions and /v1/completions, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.checks import shown
from mlxpool.common.options import MAX_COUNT, MAX_SEED, MAX_TOP_LOGPROBS
from mlxpool.common.protocol.chat import check_continued, check_messages
from mlxpool.common.protocol.choice import MAX_CHOICES
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request, unsupported_parameter
from mlxpool.gateway.field_checks import leave_tool_out
from mlxpool.gateway.generation.chat_request import ENABLE_THINKING, ChatRequest
from mlxpool.gateway.generation.images import take_image_urls
from mlxpool.gateway.generation.pool_options import openai_format, sampling_options, session_option
from mlxpool.gateway.openai.fields import (
    CHAT,
    CHAT_TEMPLATE_KWARGS,
    COMPLETION,
    EFFORTS,
    REASONING,
    SAMPLING,
    STREAM_OPTIONS,
    UNBOUNDED,
)
from mlxpool.gateway.openai.messages import as_taken

MODES: Mapping[str, str] = {  # names of clients -> names of the interface
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}
THINKING_TYPES = ("enabled", "disabled", "adaptive")
DEFAULT_MAX_TOKENS = 16  # of /v1/completions


def plain_choice(choice: Any) -> Any:
    """Converts all forms of a `tool_choice` to a mode or to {type: 'function', name: …}.

    A mode, such as auto, may be a string or the `type` of a map. A function's name may be in a map
    `function` or beside the `type`. Returns other values unchanged.
    """
    if isinstance(choice, str):
        return MODES.get(choice, choice)
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    if isinstance(kind, str) and kind in MODES:
        return MODES[kind]
    if kind not in ("function", "tool"):
        return choice
    inside = choice.get("function")
    name = inside.get("name") if isinstance(inside, Mapping) else choice.get("name")
    return {"type": "function", "name": name} if isinstance(name, str) and name else choice


def wanted_tool(choice: Any) -> str | None:
    """Returns the name of the tool that a `tool_choice` demands; None if it demands no tool.

    A choice whose type is not function, such as {type: custom, custom: {name: …}}, may lack a name.
    Its type is then returned.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(kind, str):
        return None
    inside = choice.get(kind)
    named = inside if isinstance(inside, Mapping) else choice
    name = named.get("name")
    return name if isinstance(name, str) and name else kind if kind != "function" else None


class CompletionRequest(Struct, frozen=True):
    """A checked request to /v1/chat/completions or /v1/completions.

    `prompts`: the keyword arguments of `Client.stream` for each prompt. `candidates`: the number of
    completions that are computed for each prompt. `choices`: the number of completions that are
    returned for each prompt. If it is less than `candidates`, they are the most likely ones.
    """

    model: str
    prompts: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    choices: int
    stream: bool
    usage: bool  # the stream ends with usage
    candidates: int
    logprobs: bool  # the answer has log-probabilities
    tools: Sequence[Mapping[str, Any]] = ()
    think_field: str = "reasoning_effort"  # the field that requested thoughts
    forced: Sequence[Mapping[str, Any]] = ()  # tools to choose a required call from
    several_calls: bool = True

    @property
    def prompt_logprobs(self) -> bool:
        """Whether the answer has vLLM's `prompt_logprobs`."""
        return bool(self.options.get("prompt_logprobs", -1) >= 0)

    @property
    def echo(self) -> bool:
        """Whether the text begins with the prompt."""
        return bool(self.options.get("echo"))

    @property
    def chat(self) -> ChatRequest:
        """The one prompt of /v1/chat/completions."""
        (prompt,) = self.prompts
        return ChatRequest(
            self.model,
            prompt["messages"],
            self.options,
            self.think_field,
            prompt.get("images", ()),
            self.tools,
            self.forced,
            self.several_calls,
            ".function",
        )

    def arguments(self) -> list[dict[str, Any]]:
        """Returns the arguments of `stream` for each prompt."""
        return [{**prompt, **self.options} for prompt in self.prompts]


def chat(body: Mapping[str, Any]) -> CompletionRequest:
    """Checks the body of a request to /v1/chat/completions. Raises HttpError naming the field."""
    body = CHAT.check(body)
    with_indices, images = take_image_urls(as_taken(body.get("messages")))
    messages = fields.checked("messages", check_messages, with_indices)
    tools = tools_of(body)
    forced = _forced(body, tools)
    options = _options(body)
    max_tokens = max_tokens_of(body, "max_completion_tokens")
    if max_tokens is not None and options.setdefault("max_tokens", max_tokens) != max_tokens:
        raise bad_request(
            "'max_tokens' and 'max_completion_tokens' differ", "max_completion_tokens"
        )
    options |= fields.logprob_options(body)
    think = _think(body)
    options |= {} if think is None else {"think": think}
    options |= _budget(body)
    options |= _continued(body, messages)
    options |= fields.options(body, {"plain_contents": "plain_contents"})
    prompt = {"messages": messages, **({"images": images} if images else {})}
    given_effort = _effort(body) is not None
    field = "reasoning_effort" if given_effort else ENABLE_THINKING
    request = _request(body, [prompt], options, tools)
    several = fields.flag(body, "parallel_tool_calls", True)
    return replace(request, think_field=field, forced=forced, several_calls=several)


def completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Checks the body of a request to /v1/completions. Raises HttpError naming the field."""
    body = COMPLETION.check(body)
    echo = fields.flag(body, "echo", False)
    least = 0 if echo or body.get("prompt_logprobs") is not None else 1
    options = {"max_tokens": DEFAULT_MAX_TOKENS, **_options(body, least)}
    options |= {"echo": True} if echo else {}
    options |= _suffix(body)
    top = fields.integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None:
        options |= {"logprobs": True, "top_logprobs": top}
    if echo and top is not None and options["max_tokens"] == 1 and "format" not in options:
        # Evaluation programs expect one generated token at the end, and drop it. `ignore_eos` makes
        # sure that this token exists.
        options["ignore_eos"] = True
    return _request(body, _prompts(body.get("prompt")), options, ())


def _request(
    body: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
) -> CompletionRequest:
    choices = fields.integer(body, "n", 1, MAX_CHOICES) or 1
    stream = fields.flag(body, "stream", False)
    candidates = _candidates(body, choices, stream=stream)
    if len(prompts) * candidates > MAX_CHOICES:
        message = (
            f"{len(prompts)} prompts with {candidates} choices each, at most {MAX_CHOICES} in all"
        )
        raise bad_request(message, "n")
    if options.get("seed", 0) > MAX_SEED - (candidates - 1):
        message = (
            f"'seed' is {options['seed']}, too large for {candidates} choices, at most"
            f" {MAX_SEED - (candidates - 1)}: each choice adds 1 to the seed"
        )
        raise bad_request(message, "seed")
    if stream and body.get("prompt_logprobs") is not None:
        raise unsupported_parameter("prompt_logprobs", "it cannot be combined with 'stream'")
    logprobs = "logprobs" in options
    ranked: dict[str, Any] = {}
    if candidates > choices and not logprobs:
        ranked = {"logprobs": True, "prompt_logprobs": options.get("prompt_logprobs", -1)}
    return CompletionRequest(
        fields.text(body, "model"),
        prompts,
        {**options, **ranked},
        choices,
        stream,
        _usage(body, stream),
        candidates,
        logprobs,
        tools,
    )


def _candidates(body: Mapping[str, Any], choices: int, *, stream: bool) -> int:
    """Returns the number of computed completions of each prompt: `best_of`, or else `choices`."""
    best_of = fields.integer(body, "best_of", 1, MAX_CHOICES)
    if best_of is None:
        return choices
    if best_of < choices:
        raise bad_request(f"'best_of' is {best_of}, must be at least 'n', {choices}", "best_of")
    if stream and best_of > choices:
        advice = "the best are known at the end: leave 'stream' out"
        raise unsupported_parameter("best_of", advice)
    return best_of


def _options(body: Mapping[str, Any], least_tokens: int = 1) -> dict[str, Any]:
    options = {**sampling_options(body, SAMPLING), **openai_format(body)}
    max_tokens = max_tokens_of(body, "max_tokens", least_tokens)
    options |= {} if max_tokens is None else {"max_tokens": max_tokens}
    of_prompt = fields.integer(body, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    options |= {} if of_prompt is None else {"prompt_logprobs": of_prompt}
    return {**options, **session_option(body)}


def max_tokens_of(body: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    """Returns the limit of tokens in the field `name`; None if absent. Raises HttpError.

    The value -1 means up to the model's context. It is returned as 0, the pool's value for this.
    If `least` is 0, the value 0 is allowed and means no completion; so -1 is then returned as -1.
    """
    if type(body.get(name)) is int and body[name] == UNBOUNDED["const"]:
        return 0 if least else -1
    return fields.integer(body, name, least, MAX_COUNT)


def _usage(body: Mapping[str, Any], stream: bool) -> bool:
    """Whether the stream ends with usage; always False without a stream.

    Some client libraries ask for usage in requests without a stream, too.
    """
    stream_options = fields.mapping(body, "stream_options")
    prefix = "stream_options."
    STREAM_OPTIONS.check(stream_options, prefix)
    return fields.flag(stream_options, "include_usage", False, prefix) and stream


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the offered functions. All other tools run on other servers, and are left out."""
    functions: list[dict[str, Any]] = []
    for _, tool in fields.tools_of_kind(body, ("function", None)):
        if isinstance(tool.get("function"), Mapping):
            functions.append({**tool, "type": "function"})
        elif tool.get("type"):  # the form of /v1/responses
            members = {key: value for key, value in tool.items() if key != "type"}
            functions.append({"type": "function", "function": members})
        else:
            leave_tool_out(next(iter(tool), None))
    if plain_choice(body.get("tool_choice")) == "none":
        return []
    allowed = _allowed(body)
    if allowed is None:
        return functions
    return [tool for tool in functions if tool["function"]["name"] in allowed[1]]


def _allowed(body: Mapping[str, Any]) -> tuple[str, Sequence[str]] | None:
    """Returns mode and functions of `allowed_tools`; None if `tool_choice` has another form."""
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    allowed = fields.mapping(choice, "allowed_tools")
    mode = fields.choice(allowed, "mode", ("auto", "required"), "tool_choice.allowed_tools.")
    tools = allowed.get("tools")
    functions = (
        [
            tool["function"]
            for tool in tools
            if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
        ]
        if isinstance(tools, list)
        else []
    )
    names = [function["name"] for function in functions if isinstance(function.get("name"), str)]
    if mode is None or not names:
        message = f"'tool_choice' is {shown(choice)}, it needs a mode and the names of tools"
        raise bad_request(message, "tool_choice")
    return mode, names


def _forced(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Returns the tools from which the answer must call one; empty if it need not call a tool."""
    choice = plain_choice(body.get("tool_choice"))
    allowed = _allowed(body)
    if choice in (None, "auto", "none") or (allowed and allowed[0] == "auto"):
        return ()
    if choice == "required" or allowed:
        forced = tools
    else:
        name = wanted_tool(choice)
        if name is None:
            message = (
                f"'tool_choice' is {shown(choice)}, must be auto, none, required or"
                " {type: 'function', function: {name: …}}"
            )
            raise bad_request(message, "tool_choice")
        of_functions = choice["type"] == "function"
        forced = [tool for tool in tools if of_functions and tool["function"]["name"] == name]
    if not forced:
        raise fields.no_such_tool(None if choice == "required" or allowed else name)
    return forced


def _think(body: Mapping[str, Any]) -> bool | str | None:
    """Returns the pool's option `think`, from the effort or vLLM's `chat_template_kwargs`."""
    effort = _effort(body)
    if effort is not None:
        return False if effort == "none" else EFFORTS.get(effort, True)
    return template_think(body)


def template_think(body: Mapping[str, Any]) -> bool | None:
    """Whether `chat_template_kwargs` request thoughts; None if they have no field for thoughts."""
    prefix = "chat_template_kwargs."
    kwargs = CHAT_TEMPLATE_KWARGS.check(fields.mapping(body, "chat_template_kwargs"), prefix)
    names = ("enable_thinking", "thinking")
    flags = [
        fields.flag(kwargs, name, True, prefix) for name in names if kwargs.get(name) is not None
    ]
    return flags[0] if flags else None


def _effort(body: Mapping[str, Any]) -> str | None:
    """Returns the effort of thinking that the request names; None if it names none.

    The first field with a value counts: `reasoning_effort`, `reasoning`, `think`, `thinking`,
    `enable_thinking`. A field that only turns thinking on or off gives "enabled" or "none"; a bound
    of thoughts in `reasoning` gives "enabled".
    """
    efforts = ("none", *EFFORTS)
    effort = fields.choice(body, "reasoning_effort", efforts)
    reasoning = REASONING.check(fields.mapping(body, "reasoning"), "reasoning.")
    effort = effort or fields.choice(reasoning, "effort", efforts, "reasoning.")
    effort = effort or think_effort(body)
    if effort is not None:
        return effort
    kind = fields.choice(fields.mapping(body, "thinking"), "type", THINKING_TYPES, "thinking.")
    flags = [
        fields.flag(reasoning, "enabled", False, "reasoning.")
        if reasoning.get("enabled") is not None
        else None,
        None if kind in (None, "adaptive") else kind == "enabled",
        fields.flag(body, "enable_thinking", False) if "enable_thinking" in body else None,
    ]
    thinks = next((flag for flag in flags if flag is not None), None)
    if thinks is None and reasoning.get("max_tokens") is not None:
        thinks = True  # a bound of thoughts requests thoughts
    return None if thinks is None else "enabled" if thinks else "none"


def think_effort(body: Mapping[str, Any]) -> str | None:
    """Returns the effort that Ollama's `think` names; None if it names none. Raises HttpError."""
    if isinstance(body.get("think"), bool):
        return "enabled" if body["think"] else "none"
    return fields.choice(body, "think", ("none", *EFFORTS))


def _budget(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option that bounds thought tokens, from `reasoning` or `chat_template_kwargs`.

    Returns an empty map if the request sets no bound.
    """
    budget: dict[str, Any] = {}
    for field, name in (("chat_template_kwargs", "thinking_budget"), ("reasoning", "max_tokens")):
        members = fields.mapping(body, field)
        budget |= fields.options(members, {name: "thinking_budget"}, f"{field}.")
    return budget


def _continued(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the option `continue_message` if the answer continues the last message; else {}.

    A request asks for this by `continue_message`, vLLM's `continue_final_message`, or `prefix` in
    the message.
    """
    names = [
        name
        for name in ("continue_message", "continue_final_message")
        if fields.flag(body, name, False)
    ]
    generates = fields.flag(body, "add_generation_prompt", not names)
    if names and generates:
        message = f"{names[0]!r} continues the last message: no prompt of an answer follows it"
        raise bad_request(message, "add_generation_prompt")
    if not names and messages[-1].get("prefix") is not True:
        if not generates:
            raise unsupported_parameter("add_generation_prompt", "send 'continue_message' as well")
        return {}
    fields.checked(names[0] if names else "messages", check_continued, messages)
    return {"continue_message": True}


def _suffix(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option `suffix`: the text after the completion (fill in the middle), or {}."""
    suffix = fields.options(body, {"suffix": "suffix"})
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [body.get("prompt")]
    if suffix.get("suffix") and not all(isinstance(prompt, str) for prompt in prompts):
        raise bad_request("'suffix' needs a 'prompt' that is text", "suffix")
    return suffix


def _prompts(raw: object) -> list[dict[str, Any]]:
    """Returns the prompts of a text, a list of token ids, or a list of either.

    An absent prompt is empty.
    """
    prompts = raw if isinstance(raw, list) and not _is_ids(raw) else ["" if raw is None else raw]
    if not prompts:
        raise bad_request("'prompt' must not be empty", "prompt")
    return [_prompt(prompt) for prompt in prompts]


def _prompt(raw: object) -> dict[str, Any]:
    if isinstance(raw, str):
        return {"prompt": raw}
    if isinstance(raw, list) and _is_ids(raw):
        return {"tokens": raw}
    raise bad_request(
        "'prompt' must be text, a non-empty list of token ids, or a non-empty list of texts and"
        f" such lists; got {shown(raw)}",
        "prompt",
    )


def _is_ids(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int and 0 <= value < 2**32 for value in values)
