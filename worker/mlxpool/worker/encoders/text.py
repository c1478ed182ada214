"""Texts and pairs of texts as inputs of an encoder model. Imports no MLX."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from tokenizers import Encoding

from mlxpool.common.errors import BadRequest, ContextExceeded, ModelLoadFailed
from mlxpool.common.protocol.encoder_calls import Task
from mlxpool.worker.encoders.inputs import EncodeInputs, EncoderInput
from mlxpool.worker.prompt.tokenizer import is_panic, read_tokenizer

# The instruction of a Qwen3 reranker, as in its training.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QUESTION_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QUESTION = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
QUESTION_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class EncoderTextSource(Struct, frozen=True):
    """The data with which another process prepares texts of an encoder model, see EncoderText.

    `sha256`: digest of the file `tokenizer`. `context`: the most tokens of an input. `prompts`:
    texts by name that are put before an input. `default_prompt`: the name of the default prompt;
    "": no prompt. `lower`: texts are lower-cased. `keeps_end`: truncation removes the beginning of
    a text. `asks`: a pair is converted to the question of Qwen3 rerankers. `types`: the second text
    of a pair gets segment 1, if the tokenizer has segments.
    """

    tokenizer: str
    sha256: str
    context: int
    vocab_size: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    lower: bool = False
    keeps_end: bool = False
    asks: bool = False
    types: bool = True


class OpenedEncoder(Struct, frozen=True):
    """An encoder model whose folder was checked; its weights are not loaded yet.

    `dimensions`: the length of a vector of `embed`; 0: the model does not embed. `normalises`:
    `embed` normalises vectors by default.
    """

    digest: str
    context: int
    vocab_size: int
    tasks: frozenset[Task]
    source: EncoderTextSource
    dimensions: int = 0
    normalises: bool = False
    labels: tuple[str, ...] = ()


class EncoderText:
    """The tokenizer of an encoder model, with its prompts."""

    def __init__(self, source: EncoderTextSource) -> None:
        """Raises ModelLoadFailed if a file has changed since the check."""
        self.source = source
        self._tokenizer, data = read_tokenizer(Path(source.tokenizer))
        if hashlib.sha256(data).hexdigest() != source.sha256:
            raise ModelLoadFailed(f"{source.tokenizer} has changed since the model was loaded")

    def encode_inputs(self, job: EncodeInputs) -> list[EncoderInput]:
        """Returns the inputs of the texts or pairs of a job; raises like `encode_texts`."""
        if job.pairs:
            pairs = [(first, second) for first, second in job.pairs]
            prompt = job.prompt
            if prompt is None and job.prompt_name:
                prompt = self._prompt(job.prompt_name)
            return self.encode_pairs(pairs, prompt=prompt, truncate=job.truncate, first=job.first)
        return self.encode_texts(
            job.texts,
            prompt_name=job.prompt_name,
            prompt=job.prompt,
            truncate=job.truncate,
            first=job.first,
        )

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str = "",
        prompt: str | None = None,
        truncate: bool = False,
        first: int = 0,
    ) -> list[EncoderInput]:
        """Returns the input of each text, with a prompt before the text.

        The prompt is `prompt`, or else the model's prompt `prompt_name`. If a text is too long,
        truncates it (`truncate`), or raises ContextExceeded with the index of the text, counted
        from `first`. Raises BadRequest for an unknown prompt name and for text that is not Unicode.
        """
        before = self._prompt(prompt_name) if prompt is None else prompt
        return [
            self._input(index, self._words(before + text), None, truncate)
            for index, text in enumerate(texts, first)
        ]

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        prompt: str | None = None,
        truncate: bool = False,
        first: int = 0,
    ) -> list[EncoderInput]:
        """Returns the input of each pair of a query and a document; raises like `encode_texts`.

        `prompt`, or else the model's default prompt, is put before the first text. If the model
        answers questions about pairs, the prompt is the instruction of the question.
        """
        before = self._prompt("") if prompt is None else prompt
        if self.source.asks:
            instruction = INSTRUCTION if prompt is None and not before else before
            return [
                self._question(index, instruction, query, document, truncate)
                for index, (query, document) in enumerate(pairs, first)
            ]
        return [
            self._input(index, self._words(before + query), self._words(document), truncate)
            for index, (query, document) in enumerate(pairs, first)
        ]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text with the special tokens around it, without a prompt."""
        return list(self._encoding(self._words(text), None, 0).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of these ids, as the tokenizer joins them."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _prompt(self, name: str) -> str:
        name = name or self.source.default_prompt
        if name and name not in self.source.prompts:
            names = ", ".join(self.source.prompts) or "none"
            raise BadRequest(f"there is no prompt {name!r}; this model has: {names}")
        return self.source.prompts[name] if name else ""

    def _words(self, text: str) -> str:
        return text.lower() if self.source.lower else text

    def _input(self, index: int, text: str, pair: str | None, truncate: bool) -> EncoderInput:
        context = self.source.context
        encoding = self._encoding(text, pair, context if truncate else 0)
        if len(encoding.ids) > context:
            raise ContextExceeded(
                f"input {index} has {len(encoding.ids)} tokens, the model reads at most {context};"
                " shorten it, or set truncate",
                details={"index": index, "prompt_tokens": len(encoding.ids), "context": context},
            )
        types = tuple(encoding.type_ids) if self.source.types else ()
        return EncoderInput(tuple(encoding.ids), types if any(types) else ())

    def _question(
        self, index: int, instruction: str, query: str, document: str, truncate: bool
    ) -> EncoderInput:
        """Returns the question about a pair; truncates the pair, not the question's words."""
        begin, end = (self._plain(words) for words in (QUESTION_BEGIN, QUESTION_END))
        text = QUESTION.format(instruction=instruction, query=query, document=document)
        ids, most = self._plain(text), self.source.context - len(begin) - len(end)
        if len(ids) > most and not truncate:
            raise ContextExceeded(
                f"input {index} has {len(begin) + len(ids) + len(end)} tokens with the question"
                f" around it, the model reads at most {self.source.context}; shorten it, or set"
                " truncate",
                details={"index": index, "prompt_tokens": len(ids), "context": most},
            )
        return EncoderInput((*begin, *ids[: max(most, 0)], *end))

    def _plain(self, text: str) -> list[int]:
        """Returns the ids of a text without special tokens around it."""
        return list(self._encoding(text, None, 0, special=False).ids)

    def _encoding(self, text: str, pair: str | None, most: int, special: bool = True) -> Encoding:
        """Returns the encoding of a text, or of a text and its `pair`.

        `most`: the most tokens after truncation; 0: no truncation. `special`: with special tokens.
        """
        if most:
            side = "left" if self.source.keeps_end else "right"
            self._tokenizer.enable_truncation(most, direction=side)
        try:
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text if pair is None else (text, pair)], add_special_tokens=special
            )
        except (TypeError, UnicodeError) as error:
            raise BadRequest(f"the text is not valid Unicode: {error}") from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise BadRequest(f"the tokenizer of this model fails with this text: {error}") from None
        finally:
            if most:
                self._tokenizer.no_truncation()
        return encoding


def check_ids(
    inputs: Sequence[Sequence[int]], context: int, vocab_size: int, first: int = 0
) -> None:
    """Checks inputs of token ids. Raises BadRequest or ContextExceeded with the index of an input.

    Inputs are counted from `first`.
    """
    for index, ids in enumerate(inputs, first):
        if not ids:
            raise BadRequest(f"input {index} is empty: it has no tokens")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise BadRequest(
                f"input {index} has token ids from {min(ids)} to {max(ids)}, must be below"
                f" {vocab_size}, the size of the vocabulary"
            )
        if len(ids) > context:
            raise ContextExceeded(
                f"input {index} has {len(ids)} tokens, the model reads at most {context}; shorten"
                " it",
                details={"index": index, "prompt_tokens": len(ids), "context": context},
            )
