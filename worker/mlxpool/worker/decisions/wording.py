"""How a question is put to a model, and which texts count as its answers. Pure.

Labels are not scored by their own words: a long one would be less probable than a short one, and
one that begins like another would share its first token. They are listed with letters, and the
answer is a letter. Yes, no and numbers are their own answers.
"""

from __future__ import annotations

from string import ascii_uppercase

from msgspec import Struct

from mlxpool.common.protocol.decisions import Question

BORDER = "\n\n"  # between the shared text and a question
_RAW_END = "\nAnswer:"  # behind a question to a model without a chat template


class Form(Struct, frozen=True):
    """One way to write the answers: a text for each label, in their order."""

    texts: tuple[str, ...]


def worded(question: Question, *, chat: bool) -> str:
    """The text that follows the shared text; `chat`: a chat template follows it.

    The question is its end, so that questions with the same labels begin alike.
    """
    lines = [
        f"{letter}. {one}" for letter, one in zip(ascii_uppercase, question.choices, strict=False)
    ]
    how = "Answer yes or no"
    if question.choices:
        how = "Answer with one letter"
    elif question.scale is not None:
        low, high = question.scale
        how = f"Answer with a number from {low} to {high}"
    lines.append(f"{how}: {question.text}" if question.text else f"{how}.")
    text = "\n".join(lines)
    return text if chat else text + _RAW_END


def forms(question: Question, *, chat: bool) -> list[Form]:
    """The ways in which models write the answers; the first is the one that is expected."""
    if question.choices:
        plain = [tuple(ascii_uppercase[: len(question.choices)])]
    elif question.scale is not None:
        plain = [question.labels]
    else:
        plain = [("Yes", "No"), ("yes", "no"), ("YES", "NO")]
    begins = ("", " ") if chat else (" ", "")
    return [Form(tuple(begin + one for one in texts)) for begin in begins for texts in plain]
