"""Grammars of response formats: the text for llguidance, its digest, and a test compilation.

A compilation may need unlimited time and memory. So `check` is called in a process with limits, see
worker/preparation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlxpool.common.answer_format import text_of
from mlxpool.common.errors import BadRequest
from mlxpool.worker.constraints.numbers import MAX_DIGITS, MAX_EXPONENT
from mlxpool.worker.constraints.refusals import member_of, reason, rule_of

# The fuel of one mask. The library's default is five times as much. With a third of this number,
# patterns with classes of Unicode such as \p{L} fail in the middle of an answer.
STEP_LEXER_FUEL = 40_000
MAX_LEXER_STATES = 20_000  # lexer states of one answer; a state has 1 to 2 kB
MAX_GRAMMAR_SIZE = 500_000  # symbols
# White space in JSON is at most one space after a comma or a colon, so that it cannot be endless.
JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
OWN_OPTIONS = "x-guidance"  # a key by which a schema could change JSON_OPTIONS
_DATA = ("const", "default", "enum", "examples")  # keys whose values are not schemas
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")

LIMITS = LLParserLimits(
    step_lexer_fuel=STEP_LEXER_FUEL,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=MAX_GRAMMAR_SIZE,
    verbose_errors=False,
)


def digest_of(format: Mapping[str, Any], vocabulary: str) -> str:
    """Returns a digest of everything that decides the allowed ids.

    This is the format, our grammar options, llguidance's version and the vocabulary.
    """
    bounds = f"{MAX_DIGITS} {MAX_EXPONENT}" if has_json(format) else ""
    options = json.dumps(JSON_OPTIONS) + bounds
    parts = text_of(format), llguidance.get_version(), options, vocabulary
    data = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).hexdigest()


def has_json(format: Mapping[str, Any]) -> bool:
    """Returns whether an answer of this format has JSON numbers."""
    return format["type"].startswith("json") or "%json" in format.get("grammar", "")


def grammar_of(format: Mapping[str, Any]) -> str:
    """Returns llguidance's text of a format. Raises BadRequest if llguidance refuses the format."""
    kind = format["type"]
    try:
        if kind == "json":
            return _json_grammar({"type": "object"})
        if kind == "json_schema":
            return _json_grammar(format["schema"])
        if kind == "regex":
            return LLMatcher.grammar_from_regex(format["pattern"])
        if kind == "choice":
            pattern = "|".join(map(_literal, format["choices"]))
            return LLMatcher.grammar_from_regex(pattern)
        return LLMatcher.grammar_from_lark(format["grammar"])
    except (UnicodeError, ValueError) as error:
        raise BadRequest(refused(format, str(error))) from None


def _json_grammar(schema: Mapping[str, Any] | bool) -> str:
    if isinstance(schema, bool):  # true allows any value, false no value
        schema = {} if schema else {"not": {}}
    if OWN_OPTIONS in schema:
        raise BadRequest(f"format: the schema has the key {OWN_OPTIONS!r}, which is not supported")
    _require_one_meaning(schema)
    return LLMatcher.grammar_from_json_schema(text_of(schema), overrides=JSON_OPTIONS)


def _require_one_meaning(schema: Mapping[str, Any]) -> None:
    """Raises BadRequest for a `$ref` beside an `$id`: JSON Schema drafts read it differently.

    The drafts resolve such a `$ref` against different base URIs. A `$ref` into the schema itself is
    allowed at the root, because it means the same in all drafts.
    """
    unread: list[Any] = [schema]
    while unread:
        part = unread.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            inside = part is schema and isinstance(reference, str) and reference.startswith("#")
            if isinstance(reference, str) and isinstance(part.get("$id"), str) and not inside:
                raise BadRequest(
                    "format: the schema is ambiguous: it has '$ref' beside '$id', which"
                    " drafts of JSON Schema read in different ways"
                )
            unread += [value for key, value in part.items() if key not in _DATA]
        elif isinstance(part, list | tuple):
            unread += part


def _literal(text: str) -> str:
    """Returns the regular expression that matches only `text`."""
    return _META.sub(lambda match: "\\" + match[0], text)


def check(format: Mapping[str, Any]) -> None:
    """Compiles a format only to find out whether it can be compiled, with a vocabulary of bytes.

    Raises BadRequest with llguidance's reason, which names the tool and the member of its schema.
    """
    error = _error_of(grammar_of(format))
    if error:
        raise BadRequest(_located(format, error))


def _error_of(text: str) -> str:
    """Returns why a grammar cannot be compiled; "" if it can."""
    matcher = LLMatcher(LLTokenizer("byte"), text, limits=LIMITS, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return reason(matcher.get_error()) if matcher.is_error() else ""


def _located(format: Mapping[str, Any], error: str) -> str:
    """Returns the error for a format that cannot be compiled; the error names the faulty part."""
    schema, what = format.get("schema"), ""
    if format["type"] == "lark":
        rule = rule_of(format["grammar"], error)
        if rule is None:
            return refused(format, error)
        what, schema, error = rule
    member = member_of(schema, _fails)
    place = " at ".join(part for part in (what, member) if part)
    return refused(format, f"{place}: {error}" if place else error)


def _fails(schema: Mapping[str, Any] | bool) -> bool:
    try:
        return bool(_error_of(_json_grammar(schema)))
    except (BadRequest, UnicodeError, ValueError):
        return True


def refused(format: Mapping[str, Any], why: str) -> str:
    """Returns the error message for a format that cannot be compiled."""
    kind = format["type"]
    return f"format: the {_NAMES.get(kind, kind)} cannot be followed: {reason(why)}"


_NAMES = {"json_schema": "schema", "regex": "pattern", "choice": "choices", "lark": "grammar"}
