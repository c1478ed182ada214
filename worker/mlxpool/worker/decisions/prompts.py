"""The prompts of questions about one text, and the texts of their answers.

Prompts are rendered and tokenised so that they share a prefix, in the processes that prepare
requests.

Labels are not scored by their own words: a long label would be less probable than a short label,
and similar labels would share their first token. The prompt lists labels with letters, and the
answer is a letter. Yes, no and numbers are their own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from string import ascii_uppercase

from msgspec import Struct

from mlxpool.common.errors import BadRequest, ContextExceeded
from mlxpool.common.protocol.decisions import Question
from mlxpool.worker.decisions.answers import Answers, Path, kept_forms
from mlxpool.worker.media.literals import check_ids_of_text
from mlxpool.worker.prompt.size_bound import check_bytes
from mlxpool.worker.prompt.text_model import TextModel

BORDER = "\n\n"  # between the shared text and a question
_RAW_END = "\nAnswer:"  # after a question to a model without a chat template
_CONTEXT_CHARS = 256  # characters before a cut that decide how tokenizers divide the text
_ANCHOR = "\n"  # a text before parts, so that the parts get no begin-of-sequence token
THINKS = "the chat template of this model opens its thoughts: the next token is not an answer"


class AskQuestions(Struct, frozen=True):
    """A job: make the prompts of questions (maps as in `decide`) about a text.

    `chat`: the model has a chat template. `think`: whether the model shall think; None: the
    template decides. `now`: seconds since 1970. `context`: the most tokens of a prompt and its
    answer. `first`: the number of the first question in errors.
    """

    prompt: str
    questions: Sequence[dict[str, object]]
    chat: bool
    think: bool | None
    now: float
    context: int
    first: int = 0


class Prompts(Struct, frozen=True):
    """The prompts of several questions about one text, as token ids, and the questions' answers.

    `shared`: the ids with which all prompts begin. `tails`: the other ids of each prompt, at least
    one id. If all questions have the same labels, the labels are in `shared`.
    """

    shared: list[int]
    tails: list[list[int]]
    answers: list[Answers]


def prompts_of(text: TextModel, job: AskQuestions) -> Prompts:
    """Returns the prompts of the questions of a job.

    Raises BadRequest with the name of an invalid question, and ContextExceeded if a prompt is too
    long.
    """
    questions = [
        Question.parse(f"questions[{job.first + at}]", body)
        for at, body in enumerate(job.questions)
    ]
    head, tails = _rendered(text, job, questions)
    check_bytes(len(head), text.max_bytes_per_token, job.context)
    encode = partial(text.encode, begins=not job.chat)
    shared = encode(head)
    part = _parts(text)
    prompts = [_prompt(encode, part, head, shared, tail) for tail in tails]
    common = min(min(_common(prompts[0], prompt), len(prompt) - 1) for prompt in prompts)
    end = worded_end(tails[0], worded(questions[0], chat=job.chat))
    answers = []
    for at, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
        name = f"questions[{job.first + at}]"
        if text.images is not None:
            check_ids_of_text(prompt, text.images.places)
        if len(prompt) >= job.context:
            raise ContextExceeded(
                f"{name}: text and question have {len(prompt)} tokens, the context is"
                f" {job.context}; make the text or the question shorter",
                details={"prompt_tokens": len(prompt), "context": job.context},
            )
        answers.append(_answers(name, part, end, question, chat=job.chat))
    return Prompts(prompts[0][:common], [prompt[common:] for prompt in prompts], answers)


def worded_end(tail: str, words: str) -> str:
    """Returns the last characters of a prompt, after which the answers are tokenised.

    `tail` begins with the question's words, `words`. Returns the part of `tail` after them. If
    this part is empty, returns the end of `words`.
    """
    return tail[len(words) :] or words[-_CONTEXT_CHARS:]


def _rendered(
    text: TextModel, job: AskQuestions, questions: Sequence[Question]
) -> tuple[str, list[str]]:
    """Returns the common beginning of all prompts, and the remaining text of each prompt.

    A template is rendered for the first and the last question. If these two prompts differ only in
    the words of the question, the template is not rendered for the other questions.
    """
    words = [worded(question, chat=job.chat) for question in questions]
    before = job.prompt + BORDER
    if not job.chat:
        return before, words

    def render(question: str) -> str:
        message = {"role": "user", "content": before + question}
        chat = text.render([message], [], job.now, job.think)
        if chat.thinks:
            raise BadRequest(THINKS)
        return chat.text

    whole = render(words[0])
    head, separator, end = whole.rpartition(words[0])
    if not separator or not head.endswith(BORDER):
        return _divided([whole, *map(render, words[1:])])
    if len(words) > 1 and render(words[-1]) != head + words[-1] + end:
        return _divided([whole, *map(render, words[1:])])
    return head, [question + end for question in words]


def _divided(prompts: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the common beginning of all texts, and the non-empty remainder of each text."""
    common = min(_common(prompts[0], prompt) for prompt in prompts)
    common = min(common, *(len(prompt) - 1 for prompt in prompts))
    return prompts[0][:common], [prompt[common:] for prompt in prompts]


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the length of the common beginning of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _parts(text: TextModel) -> Callable[[str], list[int]]:
    """Returns a function that tokenises a text as if it were in the middle of a prompt."""
    begin = len(text.encode(_ANCHOR))

    @cache
    def part(words: str) -> list[int]:
        return text.encode(_ANCHOR + words, (len(_ANCHOR),))[begin:]

    return part


def _prompt(
    encode: Callable[[str], list[int]],
    part: Callable[[str], list[int]],
    head: str,
    shared: list[int],
    tail: str,
) -> list[int]:
    """Returns the ids of `head` + `tail`; `shared` are the ids of `head`.

    Only the tail is tokenised, together with the end of the head. But if a token has characters of
    both, the whole text is tokenised.
    """
    near = head[-_CONTEXT_CHARS:]
    before, joint = part(near), part(near + tail)
    if joint[: len(before)] == before:
        return shared + joint[len(before) :]
    return encode(head + tail)


def _answers(
    name: str, part: Callable[[str], list[int]], end: str, question: Question, *, chat: bool
) -> Answers:
    """Returns the token sequences of a question's labels, after a prompt that ends with `end`.

    Raises BadRequest if two labels have the same tokens.
    """
    paths = [
        paths for form in forms(question, chat=chat) for paths in _paths(part, end, form.texts)
    ]
    answers = Answers(kept_forms(paths))
    same = answers.twice()
    if same is not None:
        first, second = (question.labels[index] for index in same)
        raise BadRequest(
            f"{name}: the tokenizer of this model gives {first!r} and {second!r} the same tokens"
        )
    return answers


def _paths(part: Callable[[str], list[int]], end: str, texts: Sequence[str]) -> list[list[Path]]:
    """Returns the tokens of answers, in one or two forms.

    The first form has the tokens after a prompt that ends with `end`. If the tokens of the answers
    alone differ, they are the second form. If a token would span the end of the prompt, only the
    second form is returned.
    """
    before = part(end)
    alone = [tuple(part(text)) for text in texts]
    joint = [part(end + text) for text in texts]
    if any(ids[: len(before)] != before for ids in joint):
        return [alone]  # a token would span the end of the prompt, whose ids are fixed
    behind = [tuple(ids[len(before) :]) for ids in joint]
    return [behind] if behind == alone else [behind, alone]


# ---- wording ------------------------------------------------------------------------------------


class Form(Struct, frozen=True):
    """A way to write the answers: a text for each label, in the order of the labels."""

    texts: tuple[str, ...]


def worded(question: Question, *, chat: bool) -> str:
    """Returns the text that asks a question, after the shared text; `chat`: for a chat template.

    The question itself comes last, so that questions with the same labels share a prefix.
    """
    lines = [
        f"{letter}. {choice}"
        for letter, choice in zip(ascii_uppercase, question.choices, strict=False)
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
    """Returns the forms in which models write the answers, the expected form first."""
    if question.choices:
        plain = [tuple(ascii_uppercase[: len(question.choices)])]
    elif question.scale is not None:
        plain = [question.labels]
    else:
        plain = [("Yes", "No"), ("yes", "no"), ("YES", "NO")]
    begins = ("", " ") if chat else (" ", "")
    return [Form(tuple(begin + text for text in texts)) for begin in begins for texts in plain]
