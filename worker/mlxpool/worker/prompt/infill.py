"""Prompts of a text with a gap, for models whose tokenizer has the tokens of one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from mlxpool.common.errors import BadRequest

NO_INFILL = (
    "suffix is not supported: the tokenizer of this model has no tokens around the texts before and"
    " behind a gap; leave it out"
)
# Texts that end what fills a gap: tokens that such models draw behind it, which need not end
# answers elsewhere.
ENDS = (
    "<EOT>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<file_sep>",
    "<repo_name>",
)


class InfillTokens(Struct, frozen=True):
    """The tokens before the text in front of the gap, before the one behind it, and at the end.

    `suffix_first`: the text behind the gap comes first. `middle`: "" for none.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


# In the order in which they are looked for; names of models are examples.
KNOWN = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek coder
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens("<PRE>", "<SUF>", "<MID>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
_JOINT = "\n"  # a text behind which others are encoded as they are inside of a text


def infill_ids(
    prompt: str,
    suffix: str,
    id_of: Callable[[str], int | None],
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """Returns the ids of a prompt with a gap behind `prompt` and before `suffix`.

    `id_of` gives the id of a token, or None; `encode` the ids of a text. Raises BadRequest for a
    tokenizer without such tokens.
    """
    for known in KNOWN:
        names = [known.prefix, known.suffix, *([known.middle] if known.middle else [])]
        ids = [found for name in names if (found := id_of(name)) is not None]
        if len(ids) == len(names):
            front, behind, *end = ids
            before, after = encode(prompt) if prompt else (), _inside(suffix, encode)
            if known.suffix_first:
                return [behind, *after, front, *before, *end]
            return [front, *before, behind, *after, *end]
    raise BadRequest(NO_INFILL)


def _inside(text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The ids of a text that goes on from another one: some tokenizers begin each with a space."""
    joint, both = [*encode(_JOINT)], [*encode(_JOINT + text)]
    plain = both[: len(joint)] == joint
    return both[len(joint) :] if plain else [*encode(text)]
