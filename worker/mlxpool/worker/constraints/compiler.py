"""Compiles response formats into constraints, in a separate thread; caches the grammar texts.

Every answer has its own compiled grammar: copies of a grammar share lexer states, so one answer
would use up the states of another answer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from mlxpool.common.errors import BadRequest
from mlxpool.worker.constraints import grammar
from mlxpool.worker.constraints.constraint import Constraint, EndTokens
from mlxpool.worker.constraints.numbers import NumberBound, NumberTokens
from mlxpool.worker.constraints.vocabulary import words_of

MAX_GRAMMARS = 64  # cached texts of grammars
SMALL_GRAMMAR = 16 * 1024  # characters; a text of this length is tokenised in some 4 ms

log = logging.getLogger("mlxpool.worker")


class Compiler:
    """Makes constraints, one for each answer of a model with a response format.

    The parameter `load` is a function that returns the model's vocabulary. `vocabulary` is a text
    that identifies this vocabulary in digests. Formats must have passed `grammar.check`.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        vocabulary: str,
        eos: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._load = load
        self._vocabulary = vocabulary
        ends = words_of(eos, vocab_size)
        self._ends = EndTokens.of(ends, words_of(range(vocab_size), vocab_size) & ~ends)
        self._tokenizer: LLTokenizer | None = None
        self._numbers: NumberTokens | None = None
        self._grammars: OrderedDict[str, str] = OrderedDict()  # texts by digest
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def digest(self, format: Mapping[str, Any]) -> str:
        """Returns the digest of a format; a resumed stream must have the same digest."""
        return grammar.digest_of(format, self._vocabulary)

    def knows(self, format: Mapping[str, Any]) -> bool:
        """Returns whether the format was compiled before. Any thread may call it."""
        return self.digest(format) in self._grammars

    def load(self) -> None:
        """Loads the vocabulary, once. Only the compiler's thread calls it.

        With a large vocabulary, llguidance holds Python's GIL for a second or two. So call it
        before the first stream, or while there is no stream; otherwise streams wait.
        """
        if self._tokenizer is None:
            tokenizer = self._tokenizer = self._load()
            pieces = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
            self._numbers = NumberTokens.of(pieces, self._ends.others.size)

    def submit(self, job: Callable[[], None]) -> None:
        """Calls a function in the thread. The function may use `constraint`; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            try:
                self._jobs.get()()
            except Exception:
                log.exception("a format could not be prepared")

    def constraint(self, format: Mapping[str, Any]) -> Constraint:
        """Returns a new constraint of a format. Raises BadRequest if the format cannot be compiled.

        Only the compiler's thread calls it.
        """
        self.load()
        assert self._tokenizer is not None and self._numbers is not None
        digest = self.digest(format)
        text = self._grammars.get(digest) or grammar.grammar_of(format)
        matcher = LLMatcher(self._tokenizer, text, limits=grammar.LIMITS, log_level=0)
        if matcher.is_error():
            raise BadRequest(grammar.refused(format, matcher.get_error()))
        self._grammars[digest] = text
        self._grammars.move_to_end(digest)
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return Constraint(
            matcher,
            self._ends,
            digest,
            tokens=self._tokenizer.vocab_size,
            canonical=self._tokenizer.is_canonical,
            small=len(text) <= SMALL_GRAMMAR,
            numbers=NumberBound(self._numbers) if grammar.has_json(format) else None,
        )
