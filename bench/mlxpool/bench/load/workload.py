"""Draws the requests of a load: lengths, token ids, and due times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from msgspec import Struct

VOCABULARY = 256  # bound of the ids of prompts, so that every model has them
# Common tokenizers have each of these words, with the space before it, as one token.
TEXT = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had"
    " not but what all were when we there can an your which their said if do will each about how up"
    " out them then she many some so these would other into has more her two like him see time"
)
WORDS = TEXT.split()


class Lengths(Struct, frozen=True):
    """A clipped log-normal distribution of lengths in tokens. Raises ValueError for bad bounds."""

    median: float
    sigma: float  # standard deviation of the logarithm; 0: every length is the median
    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"lengths from {self.minimum} to {self.maximum}: need 1 <= MIN <= MAX")
        if not (0 < self.median < math.inf and 0 <= self.sigma < math.inf):
            raise ValueError(
                f"lengths of median {self.median:g} and sigma {self.sigma:g}: need a median above"
                " 0, and a sigma of 0 or more"
            )

    @classmethod
    def of(cls, tokens: int) -> Lengths:
        """Returns a distribution that draws only the length `tokens`."""
        return cls(tokens, 0.0, tokens, tokens)

    def draw(self, random: Random) -> int:
        """Returns a length in tokens."""
        drawn = random.lognormvariate(math.log(self.median), self.sigma)
        return int(min(max(drawn, self.minimum), self.maximum))

    def __str__(self) -> str:
        return f"median {self.median:g}, sigma {self.sigma:g}, {self.minimum:,} to {self.maximum:,}"


class Workload(Struct, frozen=True):
    """The number of requests in a load, and the random distributions of their lengths.

    `text`: prompts are text; `prompt` is then their length in bytes, not in tokens.
    """

    requests: int
    prompt: Lengths
    output: Lengths
    text: bool = False


class Request(Struct, frozen=True):
    """A request. `due`: seconds after the start of the load. `output`: tokens to generate."""

    due: float
    prompt: Sequence[int] | str  # token ids, or text
    output: int


def draw(workload: Workload, rate: float, seed: str) -> list[Request]:
    """Returns the requests in the order of their due times. Equal arguments give equal requests.

    Requests arrive as a Poisson process of `rate` requests/s, or all together if `rate` is 0.
    Lengths and token ids do not depend on the rate.
    """
    lengths, ids, arrivals = (Random(f"{seed} {kind}") for kind in ("lengths", "ids", "arrivals"))
    requests, due = [], 0.0
    for _ in range(workload.requests):
        length = workload.prompt.draw(lengths)
        output = workload.output.draw(lengths)
        prompt = ids.choices(range(VOCABULARY), k=length)
        prompt_sent = text_of(prompt)[:length] if workload.text else prompt
        requests.append(Request(due, prompt_sent, output))
        due += arrivals.expovariate(rate) if rate else 0.0
    return requests


def text_of(ids: Sequence[int]) -> str:
    """Returns a text of about `len(ids)` tokens: a common word for each id."""
    return " ".join(WORDS[token % len(WORDS)] for token in ids)
