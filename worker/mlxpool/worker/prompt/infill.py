"""Fill-in-the-middle prompts, for models whose tokenizer has tokens for the gap. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from mlxpool.common.errors import BadRequest

NO_INFILL = (
    "suffix is not supported: the tokenizer of this model has no tokens for a text before and after"
    " a gap; leave it out"
)
# Tokens that models for infilling draw after the text of a gap. They end this text, but need not
# end other answers.
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
    """The tokens of a model for a prompt with a gap to fill (fill-in-the-middle).

    `prefix`: the token that precedes the text before the gap. `suffix`: the token that precedes the
    text after the gap. `middle`: the token at the end of the prompt; "": no such token.
    `suffix_first`: the prompt begins with the text after the gap.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


# In the order of the search; the names of models are examples.
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
_JOINT = "\n"  # encoded before a text, so that the text gets the ids of a middle part


def infill_ids(
    prompt: str,
    suffix: str,
    id_of: Callable[[str], int | None],
    encode: Callable[[str], Sequence[int]],
) -> list[int]:
    """Returns the ids of a prompt with a gap after `prompt` and before `suffix`.

    `id_of` returns the id of a token, or None; `encode` returns the ids of a text. Raises
    BadRequest for a tokenizer without tokens for gaps.
    """
    for tokens in KNOWN:
        names = [tokens.prefix, tokens.suffix, *([tokens.middle] if tokens.middle else [])]
        ids = [id for name in names if (id := id_of(name)) is not None]
        if len(ids) == len(names):
            front, back, *end = ids
            before, after = encode(prompt) if prompt else (), _inside(suffix, encode)
            if tokens.suffix_first:
                return [back, *after, front, *before, *end]
            return [front, *before, back, *after, *end]
    raise BadRequest(NO_INFILL)


def _inside(text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Returns the ids that a text has inside another text.

    Some tokenizers put a space before the beginning of a text; these ids have no such space.
    """
    joint, both = [*encode(_JOINT)], [*encode(_JOINT + text)]
    plain = both[: len(joint)] == joint
    return both[len(joint) :] if plain else [*encode(text)]
