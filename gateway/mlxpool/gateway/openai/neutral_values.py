"""Fields of vLLM, SGLang, llama.cpp, TGI and other servers that this server does not have.

Clients of these servers send the fields even if they are unused. A field with its neutral value
requests nothing and is accepted. A field with another value would change the answer, and is refused
by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.gateway.description.schemas import ANY, Schema
from mlxpool.gateway.field_checks import RefusedFields

_LEAVE_OUT = "leave it out"
NEUTRAL: RefusedFields = {
    **dict.fromkeys(  # options that are not built, mostly of samplers; 0 turns each off
        (
            "min_tokens",
            "mirostat",
            "mirostat_mode",
            "xtc_probability",
            "dry_multiplier",
            "dynatemp_range",
            "smoothing_factor",
            "top_a",
            "penalty_alpha",
            "epsilon_cutoff",
            "eta_cutoff",
            "no_repeat_ngram_size",
            "n_probs",
            "top_logprobs_num",
            "routed_experts_prompt_start",
            "priority",
        ),
        ((0,), _LEAVE_OUT),
    ),
    **dict.fromkeys(  # options that are not built; 1 turns each off
        (
            "typical_p",
            "typical",
            "tfs_z",
            "tfs",
            "length_penalty",
            "encoder_repetition_penalty",
            "guidance_scale",
            "num_beams",
        ),
        ((1,), _LEAVE_OUT),
    ),
    **dict.fromkeys(
        (
            "use_beam_search",
            "early_stopping",
            "watermark",
            "dynamic_temperature",
            "ban_eos_token",
            "return_full_text",
            "decoder_input_details",
            "return_tokens_as_token_ids",
            "return_hidden_states",
            "return_prompt_text",
            "return_token_offsets",
            "watermarking",
            "no_stop_trim",
            "safe_prompt",
            "enable_search",
            "backend_sampling",
            "post_sampling_probs",
            "deferred",
        ),
        ((False,), _LEAVE_OUT),
    ),
    **dict.fromkeys(  # lists and maps that are empty if unused
        (
            "bad_words",
            "banned_tokens",
            "logits_processors",
            "allowed_token_ids",
            "documents",
            "data_sources",
            "mm_processor_kwargs",
            "media_io_kwargs",
            "vllm_xargs",
            "repetition_detection",
            "logprob_token_ids",
            "truncation_side",
        ),
        ((), _LEAVE_OUT),
    ),
    "do_sample": ((True,), "use a `temperature` of 0"),
    "n_predict": ((-1,), "use `max_tokens`"),
    "max_new_tokens": ((-1,), "use `max_tokens`"),
    "top_n_sigma": ((-1, 0), _LEAVE_OUT),
    "nsigma": ((-1, 0), _LEAVE_OUT),
    "top_n_tokens": ((0,), "use `logprobs`"),
    "penalize_nl": ((True, False), _LEAVE_OUT),
    "grammar": ((), "use `structured_outputs.grammar`"),
    "json_schema": ((), "use `response_format`"),
    "regex": ((), "use `structured_outputs.regex`"),
    "ebnf": ((), "use `structured_outputs.grammar`"),
    "format": ((), "use `response_format`"),
    "negative_prompt": ((), _LEAVE_OUT),
    "stop_token_ids": ((), "name texts in `stop`"),
    "stop_regex": ((), "name texts in `stop`"),
    "truncate_prompt_tokens": ((), "use `truncate`, with `num_keep` and `num_ctx`"),
    "draft_model": ((), "drafts are the model's own (docs/speculation.md)"),
    **dict.fromkeys(
        ("lora", "lora_path", "lora_request", "adapter", "adapters", "adapter_id"),
        ((), "LoRA adapters are not applied: merge one into the weights of its model"),
    ),
}
# Parameters of samplers that are turned off, and fields that cannot change the answer.
WITHOUT_EFFECT: Mapping[str, Schema] = dict.fromkeys(
    (
        "mirostat_tau",
        "mirostat_eta",
        "xtc_threshold",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "samplers",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "details",
        "rid",
        "ec_transfer_params",
        "prediction",  # a guess at the answer, which would only make it faster
        "options",  # Ollama's, which its own routes of this interface ignore, like the next one
        "keep_alive",
        "ttl",  # LM Studio's, for a model that the request loads
    ),
    ANY,
)
