"""A lower bound of a text's tokens from its bytes, to refuse too long texts before tokenising.

A text of n bytes has at least n / b tokens, if no token covers more than b bytes and the tokenizer
omits no byte. `max_bytes_per_token` returns b for a tokenizer, or None if b is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxpool.common.errors import BadRequest, ContextExceeded

# NFC shortens a text at most to a third: it composes nine bytes of Hangul letters to three.
NFC_SHRINKS = 3
NO_BOUND = 2**63 - 1  # the most tokens of a prompt that is truncated to the context
_BYTES = 256
TOO_LONG = "shorten the prompt, or set the option truncate"
_DROPS_NOTHING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}


def max_bytes_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """Returns the most bytes of text that one token covers; None: not known.

    `tokenizer` is the content of tokenizer.json.
    """
    factor = _shrinking(tokenizer.get("normalizer"))
    added = tokenizer.get("added_tokens") or []
    if (
        factor is None
        or not _keeps_all(tokenizer.get("pre_tokenizer"))
        or any(token.get("lstrip") or token.get("rstrip") for token in added)  # absorb any spaces
    ):
        return None
    longest = _longest_token(tokenizer)
    written = max((len(token.get("content", "").encode()) for token in added), default=0)
    return None if longest is None else max(longest, written) * factor


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Returns the largest factor by which the normalizer shortens a text; None: not known."""
    factor = 1
    for step in _flat(normalizer, "normalizers"):
        kind = step.get("type")
        if kind == "NFC":
            factor *= NFC_SHRINKS
        elif kind == "Replace":
            pattern = (step.get("pattern") or {}).get("String")
            content = step.get("content")
            if not isinstance(pattern, str) or not isinstance(content, str):
                return None
            if len(content.encode()) < len(pattern.encode()):
                return None
        elif kind not in ("ByteLevel", "Prepend"):
            return None
    return factor


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Returns whether a pre-tokenizer keeps every character of a text."""
    return all(
        step.get("type") in _DROPS_NOTHING and step.get("behavior") != "Removed"
        for step in _flat(pre_tokenizer, "pretokenizers")
    )


def _longest_token(tokenizer: Mapping[str, Any]) -> int | None:
    """Returns the bytes of the longest token; None if a byte has no token in the model."""
    model = tokenizer.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type", "BPE") != "BPE" or not isinstance(vocab, Mapping):
        return None
    if model.get("byte_fallback"):
        known = all(f"<0x{byte:02X}>" in vocab for byte in range(_BYTES))
        return max(len(token.encode()) for token in vocab) if known else None
    steps = [
        *_flat(tokenizer.get("pre_tokenizer"), "pretokenizers"),
        *_flat(tokenizer.get("normalizer"), "normalizers"),
    ]
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return None
    known = sum(len(token) == 1 for token in vocab) >= _BYTES  # each character is one byte
    return max(map(len, vocab)) if known else None


def _flat(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normalizer or pre-tokenizer, including the steps of its sequences."""
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for nested in part.get(inner) or []:
        yield from _flat(nested, inner)


def check_bytes(size: int, max_bytes: int | None, context: int) -> None:
    """Raises ContextExceeded if a text of at least `size` bytes certainly has too many tokens."""
    if max_bytes is None:
        return
    least = -(-size // max_bytes)
    if least >= context:
        raise ContextExceeded(
            f"the prompt has {size} bytes, which are at least {least} tokens (a token of this model"
            f" is at most {max_bytes} bytes long), the context is {context}; {TOO_LONG}",
            details={"prompt_bytes": size, "prompt_tokens_at_least": least, "context": context},
        )


def check_tokens(count: int, context: int) -> None:
    """Raises BadRequest for an empty prompt, and ContextExceeded if a prompt fills the context."""
    if not count:
        raise BadRequest(
            "the prompt is empty: it has no tokens, and the model puts none in front of it"
        )
    if count >= context:
        raise ContextExceeded(
            f"the prompt has {count} tokens, the context is {context}, where at most {context - 1}"
            f" fit; {TOO_LONG}",
            details={"prompt_tokens": count, "context": context},
        )


def check_ids(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raises BadRequest for an id without an embedding; `what`: the ids' name in errors."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise BadRequest(
            f"{what}: token id {largest} is not below {vocab_size}, the size of the vocabulary"
        )
