"""The report of a prompt: its tokens and their log-probabilities, in message-sized parts (rows)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import Options
from mlxpool.common.protocol.deltas import LOGPROB_BYTES, PROMPT_KEY
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.sequence import TokenLogprob

MAX_REPORTED = 2**18  # the most tokens and alternatives in a report: some 12 MiB
ROW_BYTES = 64 * 1024  # the most bytes of tokens and alternatives in a row

Piece = Callable[[int], bytes]
Row = tuple[str, list[dict[str, Any]]]  # text, and entries in the form of messages


class PromptReport(Struct, eq=False):
    """The state of a prompt's report. `reported`: the number of tokens reported so far.

    `alternatives`: the number of alternatives for each token; -1: no log-probabilities. `unseen`:
    the number of first tokens that the tokenizer has added; the text lacks these tokens. `text`:
    makes the text of the prompt for `echo`.
    """

    prompt: tuple[int, ...]
    piece: Piece
    alternatives: int
    reported: int = 0
    unseen: int = 0
    text: Detokenizer | None = field(default=None)

    @classmethod
    def of(
        cls, options: Options, prompt: tuple[int, ...], piece: Piece, reported: int, unseen: int
    ) -> PromptReport | None:
        """Returns the report of a request from token `reported` on; None: no report was requested.

        Raises BadRequest if the report is too long, or `reported` is larger than the prompt.
        """
        if not options.reports_prompt:
            return None
        alternatives = options.prompt_alternatives
        size = len(prompt) * (1 + max(0, alternatives))
        if size > MAX_REPORTED:
            raise BadRequest(
                f"the report of {len(prompt)} prompt tokens with {max(0, alternatives)}"
                f" alternatives each has {size} entries, at most {MAX_REPORTED}: ask for fewer"
                " (prompt_logprobs, top_logprobs), or shorten the prompt"
            )
        if reported > len(prompt):
            raise BadRequest(f"resume.reported is {reported}, the prompt has {len(prompt)} tokens")
        text = Detokenizer(piece, ()) if options.echo else None
        if text is not None:
            text.replay(prompt[unseen:reported])
        return cls(prompt, piece, alternatives, reported, unseen, text)

    def begin(self) -> Iterator[Row]:
        """Yields the rows that are known before the prompt is read.

        These are the rows of all tokens if the report has no log-probabilities, else the row of the
        first token, which never has a log-probability.
        """
        if self.alternatives < 0:
            yield from self.add([None] * (len(self.prompt) - self.reported))
        elif not self.reported:
            yield from self.add([None])

    def add(self, logprobs: Sequence[TokenLogprob | None]) -> Iterator[Row]:
        """Yields the rows of the next tokens, one for each of `logprobs`."""
        most = max(1, ROW_BYTES // (LOGPROB_BYTES * (1 + max(0, self.alternatives))))
        for at in range(0, len(logprobs), most):
            some = logprobs[at : at + most]
            begin, end = self.reported, self.reported + len(some)
            entries = [self._entry(n, logprob) for n, logprob in enumerate(some, begin)]
            self.reported = end
            yield self._text_of(begin, end), entries

    def _text_of(self, begin: int, end: int) -> str:
        if self.text is None:
            return ""
        text = self.text.replay(self.prompt[max(begin, self.unseen) : end])
        return text + self.text.finish() if end == len(self.prompt) else text

    def _entry(self, number: int, logprob: TokenLogprob | None) -> dict[str, Any]:
        entry = {PROMPT_KEY: number, **self._token(self.prompt[number])}
        if number < self.unseen:
            entry["added"] = True
        if self.alternatives < 0:
            return entry
        if logprob is None:
            return {**entry, "logprob": None, "top": []}
        top = [{**self._token(token), "logprob": value} for token, value in logprob.top]
        return {**entry, "logprob": logprob.logprob, "top": top}

    def _token(self, token: int) -> dict[str, Any]:
        return {"id": token, "token": self.piece(token).decode("utf-8", "replace")}
