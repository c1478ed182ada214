"""Requests as clients send them: their default fields are accepted, with the clients' meaning.

Bodies of client libraries, agent programs and user interfaces, shortened to the relevant fields:
each body has the fields that its program sends by default.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from anthropic.types import message_create_params as of_messages
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as of_texts
from openai.types import embedding_create_params as of_vectors
from openai.types.chat import completion_create_params as of_chats
from openai.types.responses import response_create_params as of_responses

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.field_checks import ABOUT_REQUEST
from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.generation.chat_request import calls_format
from mlxpool.gateway.openai import vectors
from mlxpool.gateway.route_table import ROUTES
from support.gateway_parsers import (
    CHAT,
    COUNT,
    EMBED,
    GENERATE,
    HI,
    JOBS,
    MESSAGES,
    OLLAMA,
    PARSERS,
    RESPONSES,
    TEXT,
)

Body = dict[str, Any]
USER: Body = {"role": "user", "content": "hi"}
SCHEMA: Body = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION: Body = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL: Body = {"type": "function", "function": FUNCTION}
CALL: Body = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CACHED: Body = {"cache_control": {"type": "ephemeral"}}
USAGE: Body = {"stream_options": {"include_usage": True}}
CALLED: Body = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def result(content: Any) -> Body:
    return {"messages": [USER, CALLED, {"role": "tool", "tool_call_id": "c", "content": content}]}


TAKEN: list[tuple[str, str, Body]] = [
    ("OpenAI's quickstart", CHAT, {"store": True, "metadata": {"a": "b"}}),
    ("openai-python: parse", CHAT, {"response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}, "stream": False}),
    ("openai-python: an answer that is sent back", CHAT, {"messages": [
        USER, {"role": "assistant", "content": "x", "refusal": None, "annotations": [],
               "audio": None, "function_call": None, "tool_calls": None}, USER]}),
    ("openai-python: the same with calls", CHAT, {"messages": [
        USER, {**CALLED, "refusal": None, "annotations": None},
        {"role": "tool", "tool_call_id": "c", "content": "x"}]}),
    ("openai-node: run tools", CHAT, {"tools": [TOOL], "tool_choice": "auto", "stream": True}),
    ("LangChain: ChatOpenAI", CHAT, {
        "n": 1, "temperature": 0.7, "stream": False, **USAGE, "stop": None, "logit_bias": None,
        "messages": [{"role": "system", "content": None}, {**USER, "name": None}]}),
    ("LangChain: content blocks", CHAT, {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, "y"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}),
    ("LangChain: OpenAIEmbeddings", EMBED, {"input": [[1, 2, 3]], "encoding_format": "base64"}),
    ("LangChain: OpenAI (text)", TEXT, {
        "best_of": 1, "n": 1, "logit_bias": {}, "max_tokens": 256, "top_p": 1, "temperature": 0.7,
        "frequency_penalty": 0, "presence_penalty": 0, "prompt": ["hi"]}),
    ("LlamaIndex: a result that is a map", CHAT, result({"a": 1})),
    ("LlamaIndex: OpenAILike", CHAT, {"max_tokens": None, "temperature": 0.1, "stream": False}),
    ("LiteLLM proxy", CHAT, {
        "user": "", "extra_body": {}, "metadata": {"requester_ip": None}, "timeout": 600,
        "max_retries": 0, "litellm_call_id": "x", "litellm_session_id": "x", **USAGE}),
    ("LiteLLM: embeddings", EMBED, {
        "input": ["a"], "input_type": "search_query", "encoding_format": None, "user": None,
        "timeout": 600, "max_retries": 2}),
    ("AI SDK: OpenAI-compatible", CHAT, {
        "user": None, "max_tokens": None, "response_format": None, "tools": [TOOL],
        "tool_choice": "auto", "stream": True, **USAGE, "reasoning_effort": None,
        "verbosity": None}),
    ("AI SDK: OpenAI responses", RESPONSES, {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "store": False, "include": ["reasoning.encrypted_content"], "max_tool_calls": None,
        "tools": [{"type": "function", **FUNCTION, "strict": None}], "tool_choice": "auto"}),
    ("AI SDK: Anthropic", MESSAGES, {
        "tools": [{"name": "f", "input_schema": SCHEMA, **CACHED, "eager_input_streaming": True}],
        "tool_choice": {"type": "auto"}, "system": [{"type": "text", "text": "x", **CACHED}]}),
    ("Continue: chat", CHAT, {
        "max_tokens": 2048, "stream": True, "stop": [""], "prediction": {
            "type": "content", "content": "x"}}),
    ("Continue: completion with Ollama", GENERATE, {
        "prompt": "x", "suffix": "y", "raw": False, "keep_alive": 1800, "options": {
            "temperature": 0.01, "num_predict": 4096, "stop": [""], "num_ctx": 8192,
            "mirostat": 0, "num_thread": 4}}),
    ("Cline: LM Studio", CHAT, {
        "messages": [{"role": "system", "content": "x"}, USER], "stream": True, **USAGE,
        "temperature": 0, "max_tokens": -1}),
    ("Cline: Ollama", OLLAMA, {"stream": True, "options": {"num_ctx": 32768}}),
    ("aider", CHAT, {
        "temperature": 0, "stream": True, "extra_headers": {"a": "b"}, "num_ctx": 8192,
        "messages": [{"role": "system", "content": [{"type": "text", "text": "x", **CACHED}]},
                     USER]}),
    ("Open WebUI: Ollama", OLLAMA, {
        "stream": True, "think": "max", "keep_alive": "5m", "options": {}, "format": None,
        "metadata": {"chat_id": "x"}}),
    ("Open WebUI: embeddings", EMBED, {"input": ["a", "b"], "user": "x"}),
    ("Open WebUI: rerank", "/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 1}),
    ("n8n", CHAT, {
        "temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1,
        "stream": True, **USAGE, "response_format": {"type": "text"}, "timeout": 60000}),
    ("n8n: a result that is a list", CHAT, result([{"city": "Lisbon"}])),
    ("Zed", CHAT, {
        "stream": True, **USAGE, "stop": [], "temperature": 1.0, "max_completion_tokens": 4096,
        "parallel_tool_calls": False, "tools": [], "prompt_cache_key": "x",
        "reasoning_effort": None}),
    ("Copilot: a key of one's own", CHAT, {
        "stream": True, **USAGE, "temperature": 0.1, "top_p": 1, "n": 1, "max_tokens": 4096,
        "tools": [TOOL], "tool_choice": "auto", "messages": [
            {"role": "system", "content": "x", "copilot_cache_control": {"type": "ephemeral"}},
            {**USER, "name": "me"}]}),
    ("Claude Code", MESSAGES, {
        "stream": True, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"}, "context_management": {"edits": []},
        "tools": [{"name": "f", "input_schema": SCHEMA, "defer_loading": True, "strict": False},
                  {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "x", **CACHED}
        ]}]}),
    ("tools that are not offered", MESSAGES, {
        "tools": [{"name": "f"}], "tool_choice": {"type": "none"}}),
    ("Claude Code: a count", COUNT, {
        "messages": HI, "tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["direct"]}],
        "betas": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("Anthropic's cookbook: sources", MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "document", "title": "t", "context": "c", "citations": {"enabled": True},
         "source": {"type": "text", "media_type": "text/plain", "data": "x"}, **CACHED},
        {"type": "search_result", "source": "s", "title": "t", "citations": {"enabled": True},
         "content": [{"type": "text", "text": "x"}]}]}]}),
    ("anthropic-python: an answer as a user's message", MESSAGES, {"messages": [
        {"role": "user", "content": [
            {"type": "thinking", "thinking": "x", "signature": "y"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "text", "text": "x", "citations": None}]}]}),
    ("Codex", RESPONSES, {
        "instructions": "x", "tools": [{"type": "function", "name": "shell", "strict": False,
                                        "parameters": SCHEMA, "description": "d"},
                                       {"type": "custom", "name": "apply_patch"}],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "medium"},
        "store": False, "stream": True, "include": [], "prompt_cache_key": "x",
        "client_metadata": {"a": "b"}, "text": {"verbosity": "medium"}}),
    ("Agents SDK", RESPONSES, {
        "tools": [{"type": "function", **FUNCTION, "strict": True, "defer_loading": None}],
        "stream": True, **USAGE, "include": None, "prompt": None, "conversation": None,
        "truncation": None, "max_tool_calls": None, "metadata": None}),
    ("Goose", CHAT, {
        "stream": True, **USAGE, "tools": [{"type": "function", "function": {
            "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}],
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL],
                            "reasoning_content": ""},
                     {"role": "tool", "tool_call_id": "c", "content": [
                         {"type": "text", "text": "x"}]}]}),
    ("vLLM's clients", CHAT, {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "min_tokens": 0,
        "length_penalty": 1.0, "use_beam_search": False, "best_of": 1, "echo": False,
        "early_stopping": False, "stop_token_ids": [], "include_stop_str_in_output": False,
        "add_special_tokens": False, "add_generation_prompt": True, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "continue_final_message": False, "bad_words": [],
        "allowed_token_ids": None, "priority": 0, "logits_processors": None}),
    ("vLLM's benchmark", TEXT, {
        "best_of": 1, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 128,
        "logprobs": None, "stream": True, "ignore_eos": True, "stream_options": {
            "include_usage": True, "continuous_usage_stats": True}}),
    ("llama.cpp's page", CHAT, {
        "stream": True, "reasoning_format": "auto", "timings_per_token": True, "max_tokens": -1,
        "temperature": 0.8, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40,
        "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": None,
        "typical_p": 1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "samplers": ["top_k"], "return_progress": True}),
    ("llama.vim", TEXT, {
        "n_predict": -1, "cache_prompt": True, "mirostat": 0, "tfs_z": 1, "n_probs": 0,
        "t_max_prompt_ms": None, "samplers": ["top_k", "infill"], "penalize_nl": False}),
    ("TGI's clients", CHAT, {
        "typical_p": None, "do_sample": True, "watermark": False, "details": True,
        "return_full_text": False, "decoder_input_details": False, "top_n_tokens": None}),
    ("LM Studio's example", CHAT, {
        "temperature": 0.7, "max_tokens": -1, "stream": False, "ttl": 300, "seed": -1}),
    ("Ollama's options at OpenAI's path", CHAT, {
        "think": False, "options": {"num_ctx": 8192}, "keep_alive": "5m"}),
    ("SillyTavern: text", TEXT, {
        "max_new_tokens": None, "typical_p": 1, "typical": 1, "tfs": 1, "top_a": 0, "min_tokens": 0,
        "repetition_penalty": 1.1, "penalty_alpha": 0, "num_beams": 1, "length_penalty": 1,
        "early_stopping": False, "epsilon_cutoff": 0, "eta_cutoff": 0, "guidance_scale": 1,
        "negative_prompt": "", "ban_eos_token": False, "skip_special_tokens": True,
        "dry_sequence_breakers": ["\n"], "mirostat_mode": 0, "mirostat_tau": 5,
        "mirostat_eta": 0.1, "no_repeat_ngram_size": 0, "dynamic_temperature": False,
        "smoothing_factor": 0, "nsigma": 0, "xtc_probability": 0, "json_schema": {},
        "seed": -1}),
    ("LibreChat", CHAT, {"user": "x", "stream": True, "include_reasoning": True, "stop": ""}),
    ("NVIDIA's clients", EMBED, {
        "input": ["a"], "input_type": "passage", "truncate": "END", "encoding_format": "float",
        "user": "x", "dimensions": None}),
    ("Cohere's clients", EMBED, {
        "input": ["a"], "input_type": "search_document", "truncate": "NONE",
        "embedding_types": ["float"]}),
    ("Ollama's options of vectors at OpenAI's path", EMBED, {"options": {}, "keep_alive": -1}),
    ("DeepSeek's clients", CHAT, {
        "thinking": {"type": "disabled"}, "frequency_penalty": 0, "logprobs": False,
        "top_logprobs": None, "response_format": {"type": "text"}, "tool_choice": "none"}),
    ("OpenRouter's clients", CHAT, {
        "reasoning": {"enabled": False}, "usage": {"include": True}, "transforms": [],
        "messages": [USER, {"role": "assistant", "content": "x", "reasoning": "y",
                            "reasoning_details": [{"type": "reasoning.text", "text": "y"}]},
                     USER]}),
    ("Spring AI", CHAT, {"messages": [{**USER, "name": None, "tool_calls": None}],
                         "stream": False, "temperature": 0.7, "top_p": None}),
    ("Azure's proxies", CHAT, {"messages": [{"role": "system", "content": None},
                                            {"role": "user", "content": None}, USER]}),
    ("Semantic Kernel: a call's arguments as a map", RESPONSES, {"input": [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": "b"}},
        {"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]}),
    ("guidance: an empty prompt", TEXT, {"prompt": "", "max_tokens": 1}),
    ("a chat's tools at /v1/responses", RESPONSES, {"tools": [TOOL]}),
    ("a response's tools at /v1/chat/completions", CHAT, {"tools": [{
        "type": "function", **FUNCTION}]}),
]  # fmt: skip


def parsed(path: str, more: Body) -> Any:
    return PARSERS[path](**more)


@pytest.mark.parametrize(
    ("path", "more"), [case[1:] for case in TAKEN], ids=[name for name, _, _ in TAKEN]
)
def test_what_a_client_sends_is_taken(path: str, more: Body) -> None:
    assert parsed(path, more)


REFUSED: list[tuple[str, Body, str, str]] = [
    (CHAT, {"typical_p": 0.9}, "typical_p", "leave it out"),
    (CHAT, {"min_tokens": 5}, "min_tokens", "leave it out"),
    (CHAT, {"min_tokens": False}, "min_tokens", "leave it out"),
    (CHAT, {"do_sample": False}, "do_sample", "`temperature` of 0"),
    (CHAT, {"best_of": 3}, "best_of", "use `n`"),
    (CHAT, {"format": "json"}, "format", "use `response_format`"),
    (CHAT, {"stop": [None]}, "stop", "list of strings"),
    (CHAT, {"seed": -2}, "seed", "from -1"),
    (CHAT, {"max_tokens": -2}, "max_tokens", "from 1"),
    (CHAT, {"think": "most"}, "think", "must be one of"),
    (TEXT, {"prompt": []}, "prompt", "must not be empty"),
    (TEXT, {"prompt": 0}, "prompt", "must be text"),
    (EMBED, {"truncate": "START"}, "truncate", "at their end"),
    (EMBED, {"encoding_format": "ubinary"}, "encoding_format", "float, base64"),
    (EMBED, {"output_dimension": 8}, "output_dimension", "use `dimensions`"),
    (RESPONSES, {"typical_p": 0.9}, "typical_p", "leave it out"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "input_schema": SCHEMA}]},
     "tools[0].input_schema", "use `parameters`"),
    (MESSAGES, {"tools": [{"name": "f", "parameters": SCHEMA}]}, "tools[0].parameters",
     "use `input_schema`"),
    (OLLAMA, {"think": "most"}, "think", "must be true, false or one of"),
    (JOBS, {"kind": "generate", "inputs": ["a"]}, "inputs", "'inputs' is only for calls"),
    ("/v1/decisions", {"prompt": " "}, "prompt", "no text but white space"),
    (GENERATE, {"context": [1], "images": ["aGk="]}, "context", "cannot be combined with images"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "must be text, json_object"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format", "'response_format.json_schema.schema' is missing"),
    (CHAT, {"guided_json": "{"}, "guided_json", "'guided_json' is not JSON"),
    (CHAT, {"guided_choice": 5}, "guided_choice", "a list of 1 to 1024"),
    (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
     "one format, these ask for several: 'guided_regex', 'response_format'"),
    (RESPONSES, {"metadata": {str(key): "" for key in range(17)}}, "metadata", "17 pairs"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", ""),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice", "no function"),
    (RESPONSES, {"messages": [{}]}, "messages", "use `input`"),
    (MESSAGES, {"tool_choice": {"name": "f"}}, "tool_choice.type", "is missing"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": 5}]}, "tools", "must be a map"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages", "are missing"),
    *[
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "image", "source": image_source}]}]}, "messages", words)
        for image_source, words in (({"type": "url", "url": "http://a"}, "not fetched"),
                                    ("x", "must be {type: 'base64'"))
    ],
    *[
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "document", "source": document}]}]}, "messages", "send the text of it")
        for document in ({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
                         {"type": "url", "url": "https://a.example/a.pdf"},
                         {"type": "file", "file_id": "f"})
    ],
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages",
     "'hologram', must be text, image"),
    *[
        (path, {"tools": tools, "tool_choice": choice}, "tool_choice", f"'{name}', which is no")
        for name, choice in (("web_search", {"type": "web_search"}),
                             ("p", {"type": "custom", "name": "p"}),
                             ("p", {"type": "custom", "custom": {"name": "p"}}),
                             ("g", {"type": "function", "name": "g"}))
        for path, tools in ((CHAT, [TOOL, {"type": "web_search"}]),
                            (RESPONSES, [{"type": "function", **FUNCTION}, {"type": "custom"}]))
    ],
    (MESSAGES, {"tools": [{"name": "f"}, {"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice", "'bash', which"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "param", "words"), REFUSED)
def test_what_would_change_the_answer_is_named(
    path: str, more: Body, param: str, words: str
) -> None:
    with pytest.raises(HttpError) as caught:
        parsed(path, more)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_empty_texts_are_nothing_to_stop_at() -> None:
    for given, stop in (("", None), ([""], ()), (["", "x", ""], ("x",)), ("x", ("x",))):
        assert parsed(CHAT, {"stop": given}).options.get("stop") == stop
    request = parsed(MESSAGES, {"stop_sequences": ["", "x"]})
    assert request.chat.options["stop"] == request.stops == ("x",)
    assert parsed(OLLAMA, {"options": {"stop": [""]}}).options["stop"] == ()


def test_minus_one_is_unbounded_and_a_drawn_seed() -> None:
    request = parsed(CHAT, {"max_tokens": -1, "seed": -1, "n": 2})
    assert request.options["max_tokens"] == 0 and "seed" not in request.options
    assert parsed(TEXT, {"max_tokens": -1}).options["max_tokens"] == 0


def test_usage_of_a_stream_needs_one() -> None:
    assert not parsed(CHAT, USAGE).usage
    assert parsed(CHAT, {**USAGE, "stream": True}).usage


@pytest.mark.parametrize(
    ("think", "found"), [(True, True), (False, False), ("max", "high"), ("low", "low"), ("", None)]
)
def test_ollamas_think_is_heard_on_every_path(think: bool | str, found: object) -> None:
    assert parsed(CHAT, {"think": think}).options.get("think") == found
    assert parsed(RESPONSES, {"think": think}).chat.options.get("think") == found
    assert parsed(OLLAMA, {"think": think}).think == found


def test_contents_have_one_form() -> None:
    given = [
        {"role": "system", "content": None},
        {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}, {"text": "c"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"role": "user", "content": {"type": "text", "text": "e"}},
    ]
    (prompt,) = parsed(CHAT, {"messages": given}).prompts
    system, user, said, last = prompt["messages"]
    assert system["content"] == ""
    assert [part["text"] for part in user["content"]] == ["a", "b", "c"]
    assert said["content"] == [{"type": "text", "text": "d"}]
    assert last["content"] == [{"type": "text", "text": "e"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": "é"}, '{"a": "é"}'), ([{"type": "event", "x": 1}], '[{"type": "event", "x": 1}]'),
        (["a", "b"], '["a", "b"]'), (5, "5"), (False, "false"), (None, ""), ([], ""),
    ],
)  # fmt: skip
def test_a_result_that_is_no_text_is_its_json(content: Any, text: str) -> None:
    (prompt,) = parsed(CHAT, result(content)).prompts
    assert prompt["messages"][2]["content"] == text


def test_a_document_of_text_is_read_in_either_form() -> None:
    coded = base64.b64encode("é".encode()).decode()
    for source in (
        {"type": "text", "media_type": "text/plain", "data": "é"},
        {"type": "base64", "media_type": "text/markdown", "data": coded},
    ):
        block = {"type": "document", "title": "T", "source": source}
        request = parsed(MESSAGES, {"messages": [{"role": "user", "content": [block]}]})
        assert request.chat.messages[0]["content"] == "T\né"
    broken = {"type": "base64", "media_type": "text/plain", "data": "/w=="}
    with pytest.raises(HttpError, match="not text in UTF-8"):
        parsed(MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "document", "source": broken}]}]})  # fmt: skip


def test_what_a_user_did_not_say_is_left_out() -> None:
    kinds = ("thinking", "redacted_thinking", "server_tool_use", "web_search_tool_result")
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "x"}]
    request = parsed(MESSAGES, {"messages": [{"role": "user", "content": content}]})
    assert list(request.chat.messages) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "schema",
    [
        None, {}, {"type": "object"}, {"type": "object", "properties": None, "required": None},
        {"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["hermes", "llama_json", "glm", "function_xml"])
def test_a_strict_function_may_have_no_parameters(format: str, schema: Body | None) -> None:
    function = {"name": "f", "strict": True, "parameters": schema}
    chat = parsed(CHAT, {"tools": [{"type": "function", "function": function}]})
    response = parsed(RESPONSES, {"tools": [{"type": "function", **function}]}).chat
    tool = {"name": "f", "strict": True, "input_schema": schema}
    message = parsed(MESSAGES, {"tools": [tool]}).chat
    for request in (chat, response, message):
        options = calls_format(ChatFormats(format), request.tools, request.forced, request.options)
        assert "null" not in options["format"]["grammar"]


def test_a_type_of_inputs_is_the_models_prompt_of_this_kind() -> None:
    prompts = ["document", "query", "retrieval"]
    prompt_names = {
        kind: vectors.prompt_of_type(kind, prompts)
        for kind in ("query", "SEARCH_QUERY", "passage", "search_document", "clustering")
    }
    assert prompt_names == {
        "query": "query",
        "SEARCH_QUERY": "query",
        "passage": "document",
        "search_document": "document",
        "clustering": None,
    }
    assert parsed(EMBED, {"input_type": "query", "prompt_name": "x"}).input_type == ""
    assert parsed(EMBED, {"truncate": "END"}).settings["truncate"] is True


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, EMBED, MESSAGES])
def test_every_parameter_of_the_official_clients_is_known(path: str) -> None:
    types: Mapping[str, Sequence[type]] = {
        CHAT: [of_chats.CompletionCreateParamsBase],
        TEXT: [of_texts.CompletionCreateParamsBase],
        RESPONSES: [of_responses.ResponseCreateParamsBase],
        EMBED: [of_vectors.EmbeddingCreateParams],
        MESSAGES: [of_messages.MessageCreateParamsBase, beta_messages.MessageCreateParamsBase],
    }
    (body,) = [route.body for route in ROUTES if (route.method, route.path) == ("POST", path)]
    assert body is not None
    names = {name for parameters in types[path] for name in parameters.__annotations__}
    assert not {field for field in names - body.names if not ABOUT_REQUEST.fullmatch(field)}
