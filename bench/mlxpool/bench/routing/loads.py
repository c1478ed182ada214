"""Makes loads to compare routing policies: requests whose prompts share beginnings.

A drawn load has `count` chats, agents or independent requests; `rate` of them start each second.

A request comes at a given time, or some seconds after the end of another request. The next turn of
a chat, for example, is sent after the user has read the last answer, and an agent sends its next
call after the answer to its last one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, field

BLOCK = 512  # tokens of one hash of a recorded load
Segment = tuple[str, int]  # a name, equal for equal text, and the number of its tokens


class Call(Struct, frozen=True):
    """A request. `after`: the index of the request that it follows by `delay` seconds.

    Without `after` the request comes `delay` seconds after the start of the load. `prompt` is the
    whole prompt.
    """

    prompt: tuple[Segment, ...]
    output: int
    delay: float
    answer: str = ""  # the name of the answer as a segment of later prompts
    session: str = ""
    after: int | None = None

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.prompt)


class Load(Struct):
    """The requests of a load, in the order in which they were drawn."""

    name: str
    calls: list[Call] = field(default_factory=list)

    def add(self, call: Call) -> int:
        self.calls.append(call)
        return len(self.calls) - 1


def chats(seed: int, count: int = 120, *, rate: float = 2.0, system: int = 800) -> Load:
    """Returns long chats that share a system prompt: 3 to 9 turns, about 8 s between two turns."""
    draw, load = random.Random(seed), Load("chats, one system prompt")
    for chat, at in enumerate(_arrivals(draw, count, rate)):
        _chat(load, draw, f"chat {chat}", (("system", system),), at)
    return load


def tenants(seed: int, count: int = 240, *, rate: float = 3.0, tenants: int = 24) -> Load:
    """Returns chats of 1 to 3 turns; each of many tenants has a long prompt of its own.

    A few tenants have most of the chats.
    """
    draw, load = random.Random(seed), Load("tenants, a long prompt each")
    shares = [1 / (rank + 1) for rank in range(tenants)]
    for chat, at in enumerate(_arrivals(draw, count, rate)):
        tenant = draw.choices(range(tenants), shares)[0]
        _chat(load, draw, f"chat {chat}", ((f"tenant {tenant}", 1600),), at, turns=(1, 3))
    return load


def agents(seed: int, count: int = 40, *, rate: float = 0.5) -> Load:
    """Returns agents that call tools in loops of 4 to 8 steps, with 1 to 3 branches each."""
    draw, load = random.Random(seed), Load("agents with branches")
    for agent, at in enumerate(_arrivals(draw, count, rate)):
        prompt: tuple[Segment, ...] = (("agent", 1200), (f"task {agent}", draw.randint(100, 400)))
        last, delay = None, at
        for step in range(draw.randint(4, 8)):
            ends = []
            for branch in range(draw.choices((1, 2, 3), (6, 2, 1))[0]):
                output, answer = draw.randint(20, 120), f"agent {agent} answer {step} {branch}"
                call = Call(prompt, output, delay, answer, f"agent {agent}", last)
                ends.append((load.add(call), answer, output))
            last, name, output = draw.choice(ends)
            prompt += ((name, output), (f"result {agent} {step}", draw.randint(50, 500)))
            delay = draw.uniform(0.1, 2.0)
    return load


def long_agents(
    seed: int, count: int = 40, *, rate: float = 2.0, kinds: int = 4, turns: Sequence[int] = (6, 12)
) -> Load:
    """Returns agents of a few kinds in long conversations; each kind has a long system prompt.

    A turn appends the answer and the result of a tool to the prompt. The prompt therefore has 1,600
    to 7,000 tokens, about 50 times as many as the answers. An agent sends its next turn when the
    tool is done.
    """
    draw, load = random.Random(seed), Load("agents in long conversations")
    for agent, at in enumerate(_arrivals(draw, count, rate)):
        kind = draw.randrange(kinds)
        prompt: tuple[Segment, ...] = ((f"kind {kind}", 1500), (f"task {agent}", 100))
        last, delay = None, at
        for turn in range(draw.randint(*turns)):
            output, answer = draw.randint(30, 100), f"agent {agent} answer {turn}"
            last = load.add(Call(prompt, output, delay, answer, f"agent {agent}", last))
            prompt += ((answer, output), (f"result {agent} {turn}", draw.randint(100, 600)))
            delay = draw.uniform(0.1, 3.0)
    return load


def long_prefixes(seed: int, count: int = 240, *, rate: float = 8.0, groups: int = 16) -> Load:
    """Returns short questions about a few long documents: prompts are far longer than answers."""
    draw, load = random.Random(seed), Load("long prefixes, short questions")
    for number, at in enumerate(_arrivals(draw, count, rate)):
        document = (f"document {draw.randrange(groups)}", 3000)
        prompt = (document, (f"question {number}", draw.randint(20, 60)))
        load.add(Call(prompt, draw.randint(16, 48), at, f"question {number} answer"))
    return load


def one_hot_prompt(seed: int, count: int = 300, *, rate: float = 6.0) -> Load:
    """Returns independent requests, too many for one worker, that share one long beginning."""
    draw, load = random.Random(seed), Load("one hot prompt")
    for number, at in enumerate(_arrivals(draw, count, rate)):
        prompt = (("hot", 2000), (f"question {number}", draw.randint(20, 80)))
        load.add(Call(prompt, draw.randint(40, 200), at))
    return load


def nothing_shared(seed: int, count: int = 300, *, rate: float = 3.0) -> Load:
    """Returns independent requests with log-normal lengths and nothing in common."""
    draw, load = random.Random(seed), Load("nothing shared")
    for number, at in enumerate(_arrivals(draw, count, rate)):
        length = int(min(3000, max(16, draw.lognormvariate(5.6, 1.0))))
        output = int(min(512, max(16, draw.lognormvariate(4.8, 0.7))))
        load.add(Call(((f"prompt {number}", length),), output, at))
    return load


SYNTHETIC: tuple[Callable[[int], Load], ...] = (
    chats,
    tenants,
    agents,
    long_agents,
    long_prefixes,
    one_hot_prompt,
    nothing_shared,
)


def recorded(path: Path, *, most: int = 2000) -> Load:
    """Reads a recorded load: JSON lines with timestamp (ms), input_length, output_length, hash_ids.

    Each hash stands for BLOCK tokens of the prompt and all tokens before them. Mooncake's published
    traces have this form. Reads at most `most` requests. Raises ValueError naming the line.
    """
    load = Load(path.name)
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if number > most:
                break
            try:
                row = json.loads(line)
                remaining, segments = int(row["input_length"]), []
                for hash_id in row["hash_ids"]:
                    segments.append((f"block {hash_id}", min(BLOCK, remaining)))
                    remaining -= BLOCK
                call = Call(tuple(segments), int(row["output_length"]), row["timestamp"] / 1000)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from None
            load.add(call)
    return load


def _arrivals(draw: random.Random, count: int, rate: float) -> Iterator[float]:
    at = 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        yield at


def _chat(
    load: Load,
    draw: random.Random,
    name: str,
    prompt: tuple[Segment, ...],
    at: float,
    turns: Sequence[int] = (3, 9),
) -> None:
    last, delay = None, at
    for turn in range(draw.randint(*turns)):
        prompt += ((f"{name} question {turn}", draw.randint(15, 120)),)
        output, answer = draw.randint(40, 240), f"{name} answer {turn}"
        last = load.add(Call(prompt, output, delay, answer, name, last))
        prompt += ((answer, output),)
        delay = draw.expovariate(1 / 8)
