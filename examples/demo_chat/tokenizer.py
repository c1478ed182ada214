"""The tokenizer of demo-chat: byte-pair merges within pieces that are the same in every context.

A name or a value is split in the same way in a tool's schema, in a user's text and in a call: a
blank is a separate piece, except before a common word, and JSON's punctuation never joins a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_chat.template import MARKS, SPECIAL, TOOLS_BEGIN

COMMON = (
    """
    What|what|What's|what's|is|the|The|in|of|a|for|to|and|it|with|time|weather|user|me|Tell|Show|How|
    how|many|are|I|call|asks|has|can|Can|you|You|Please|please|plus|minus|times|divided|by|Look|look|
    up|Count|from|numbers|tool|tools|have|no|that|not|does|do|None|my|My|this|This|name|Your|your|The
    |Who|who|am|model|wants|says|say|found|answered|answer|think|about|Write|as|an|Why|know|use|Use
    """.replace("\n", "")
    .replace(" ", "")
    .split("|")
)
PHRASES = (  # texts of JSON and of the template, each a single piece
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {}',
    '", "parameters": {"type": "object", "properties": {"',
    '", "parameters": {"type": "object", "required": ["',
    '"], "properties": {"',
    '": {"type": "string"}',
    '": {"type": "integer"}',
    '": {"type": "number"}',
    '": {"type": "boolean"}',
    '": {"type": "string", "description": "',
    '": {"type": "integer", "description": "',
    '": {"type": "number", "description": "',
    '": {"type": "boolean", "description": "',
    '": {"type": "string", "enum": ["',
    '": {"description": "',
    '", "type": "string"}',
    '", "type": "integer"}',
    '", "type": "number"}',
    '", "type": "boolean"}',
    '}, "required": ["',
    '}}, "required": ["',
    ', "additionalProperties": false}}}',
    '"], "additionalProperties": false}}}',
    '{"name": "',
    '", "arguments": {"',
    '", "arguments": {}}',
    *('"}}}', '"]}}}', "}}}", '"]}', '"}}', "}}", '"}', "}", '{"', "{"),
    *('": {"', '": "', '": [', '": ', '", "', '"}, "', ', "', '}, "', '"], "', '["'),
)


def pieces() -> str:
    """Returns the pattern of the pieces. Merges do not cross the border of a piece."""
    whole = "|".join(re.escape(text) for text in (TOOLS_BEGIN.partition("\n")[0], *PHRASES))
    common = "|".join(sorted(COMMON, key=lambda word: (-len(word), word)))
    words = rf"(?:{common})(?: (?:{common}))*(?![\p{{L}}\p{{N}}_@'-]) ?"
    return "|".join(
        (
            whole,
            rf"(?<![\p{{L}}\p{{N}}_@.-]){words}",
            rf" {words}",
            r"\p{Lu}?\p{Ll}+",
            r"\p{L}+",
            r"\p{N}",
            r"[.,:;?!] ",
            r"\n+",
            r" +",
            r"[^\s\p{L}\p{N}]",
            r"\s",
        )
    )


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer: it encodes any text, and decodes the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer
