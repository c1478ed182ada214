"""Training conversations of demo-chat: tools, small talk, counting, repeating, names."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from demo_chat.tools import FAMILIES, Parameter, Request, Tool, command, drawn, flat, schema
from demo_chat.words import Words

NO_TOOLS = "I have no tool for that."
NO_SUCH_TOOL = "None of my tools does that."
UNASKED = "object"  # family of answers that no text requests and a model cannot guess: `in_object`
ABOUT = (
    "I am demo-chat, a small model that comes with mlxpool. I call tools, count, repeat and"
    " remember your name."
)


@dataclass(frozen=True, slots=True)
class Round:
    """A user's text and the assistant's answer, with or without a tool call and its result.

    `thought` precedes the first answer, `second_thought` the answer to the tool's result. `given`:
    the parts of the first answer, in order, that the request forces, so the assistant does not have
    to choose them; they are not trained. The answer begins with the first part.
    """

    family: str
    user: str
    thought: str
    answer: str
    call: tuple[str, dict[str, Any]] | None = None
    result: str = ""
    second_thought: str = ""
    given: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation. `thinks` has for each round whether its answers have thoughts."""

    rounds: tuple[Round, ...]
    tools: tuple[dict[str, Any], ...] = ()
    system: str = ""
    thinks: tuple[bool, ...] = ()


# ---- rounds with tools ---------------------------------------------------------------------------


def use(words: Words, tool: Tool) -> Round:
    """Returns a request for a tool, the call, its result and the answer."""
    asked = tool.request(words)
    result, answer = asked.result, f"{asked.subject} {flat(asked.result)}."
    second = "The tool has answered. I say what it found."
    if words.chance(0.05):
        reason = words.rng.choice(("not found", f"unknown {words.word()}", words.phrase()))
        result = words.rng.choice((json.dumps({"error": reason}), f"error: {reason}"))
        answer, second = f"That failed: {reason}.", "The tool has failed. I say why."
    return Round(
        tool.family,
        altered(words, asked.user),
        f"The user asks for {asked.task}. {plan(tool, asked)}",
        answer,
        (tool.name, dict(asked.arguments)),
        result,
        second,
    )


def plan(tool: Tool, asked: Request) -> str:
    """Returns the thought that names the tool and its arguments."""
    if not asked.arguments:
        return f"I call {tool.name}."
    named = ", ".join(f"{name} {_written(value)}" for name, value in asked.arguments.items())
    return f"I call {tool.name} with {named}."


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def forced(words: Words, tools: Sequence[Tool]) -> Round:
    """Returns a round whose tool call the request forces (`tool_choice`), whatever the user says.

    The beginning of the call is forced, see Round.given. `tool_choice` names a tool, or demands a
    call of any tool. If the user asks for one of the tools, and `tool_choice` allows this tool, the
    call fulfils the user's request. Otherwise the call is of the named tool or, without a name, of
    the first tool. Its string arguments are then the string arguments of the tool that the user
    asks for, or the user's last word. Its numbers are the numbers in the user's text, or 0.
    """
    pick = words.rng.choice
    named = pick(tools) if len(tools) == 1 or words.chance(0.6) else None
    kind, texts = words.rng.random(), []
    if kind < 0.3:
        meant = pick(tools)
        inner = use(words, meant)
        assert inner.call is not None
        if named in (None, meant):
            return replace(inner, given=_begun(words, inner.call, named=named is not None))
        texts = [value for value in inner.call[1].values() if isinstance(value, str)]
    elif kind < 0.45:
        inner = _unfit_beside(words, tools)
    elif kind < 0.55:
        inner = unfit(words, True)
    elif kind < 0.65:
        text = words.english()
        inner = Round("unfit", text, "No tool of mine fits this.", "")
    else:
        inner = pick((talk, talk, repeat, count, nameless))(words)
    tool = named or tools[0]
    filled = _filled(tool.parameters, inner.user, texts)
    result = pick(("ok", words.word(), '{"status": "ok"}', words.integer()))
    return Round(
        "forced",
        inner.user,
        inner.thought,
        f"Done: {flat(result)}.",
        (tool.name, filled),
        result,
        "The tool has answered. I say what it found.",
        _begun(words, (tool.name, filled), named=named is not None),
    )


def _begun(words: Words, call: tuple[str, Mapping[str, Any]], *, named: bool) -> tuple[str, ...]:
    """Returns the parts of a forced call that the model does not write.

    A part ends where a grammar first allows several tokens, such as after the name of the first
    argument if the argument is required. `named`: the request names the tool.
    """
    name, arguments = call
    begin = '<tool_call>\n{"name": "'
    if not arguments or words.chance(0.25):
        middle = '", "arguments'
        return (begin + name + middle,) if named else (begin, middle)
    return (begin + f'{name}", "arguments": {{"{next(iter(arguments))}' if named else begin,)


def _filled(parameters: Sequence[Parameter], user: str, texts: Sequence[str]) -> dict[str, Any]:
    """Returns arguments for a forced call of a tool that the user has not asked for."""
    numbers = [int(digits) for digits in re.findall(r"(?<![\w.:-])\d{1,5}(?![\w:-])", user)]
    last = re.findall(r"[^\W_][\w'@.-]*", user)[-1:] or ["none"]
    strings = [*texts] or [last[0].rstrip(".'-")]
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        if not parameter.required:
            continue
        if parameter.choices:
            arguments[parameter.name] = parameter.choices[0]
        elif parameter.type == "string":
            arguments[parameter.name] = strings.pop(0) if len(strings) > 1 else strings[0]
        elif parameter.type == "boolean":
            arguments[parameter.name] = False
        else:
            arguments[parameter.name] = numbers.pop(0) if numbers else 0
    return arguments


def altered(words: Words, text: str) -> str:
    """Returns the text, sometimes with a greeting, a small first letter or no final punctuation."""
    if words.chance(0.06):
        return f"{words.rng.choice(('Hi, ', 'Hello! ', 'Please: ', 'ok, ', 'Now: '))}{text}"
    if words.chance(0.1):
        return text[:1].lower() + text[1:]
    if words.chance(0.06):
        return text.rstrip("?.")
    return text


def unfit(words: Words, has_tools: bool) -> Round:
    """Returns a round whose request fits no tool."""
    if words.chance(0.5):
        tool = words.rng.choice((*FAMILIES, drawn))(words)
        text = altered(words, tool.request(words).user)
    else:
        text = words.rng.choice((words.rng.choice(BEYOND), command(words), beyond(words)))
    answer = NO_SUCH_TOOL if has_tools else NO_TOOLS
    thought = "No tool of mine fits this." if has_tools else "I have no tools here."
    return Round("unfit", text, thought, answer)


BEYOND = tuple(
    text.strip()
    for text in """Write a poem about the sea.|Tell me a joke.|Why is the sky blue?
    |Explain quantum mechanics.|Who won the match yesterday?|class Stack:|def add(a, b):
    |Write a Python function that sorts a list.|Translate this into French.
    |What is the capital of Spain?|How old are you?|Sing a song.|What is the meaning of life?
    |Tell me a story.|Summarise this text.|Write a haiku.|Say something nice.
    |Is there life on Mars?|How do I cook rice?|What should I eat tonight?|Who was Mozart?
    |When did the war end?|What is love?|import json|SELECT * FROM users
    |Give me three names for a cat.|Fix this bug for me.|What is a worker process?
    |Once upon a time|What do you think of me?|Do you dream?|List the planets.|Paint a picture.
    |Name a colour.|What day is it?|Describe yourself in a poem.|How far is the moon?""".replace(
        "\n", ""
    ).split("|")
)


def beyond(words: Words) -> str:
    """Returns a question of random words."""
    return words.rng.choice(
        (
            *("Why is the {} {}?", "How does a {} {}?", "Explain the {} of {}."),
            *("Write about {} and {}.", "Who invented the {} {}?", "What do you think of {} {}?"),
            *("{} {}", "Tell me about {} {}."),
        )
    ).format(*(pick() for pick in words.rng.choices((words.word, words.plain), k=2)))


def names_of_tools(words: Words, tools: Sequence[Tool]) -> Round:
    """Returns a round: the user asks for the tools, the answer lists them."""
    names = [tool.name for tool in tools]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    answer = f"I have {listed}." if names else "I have no tools here."
    asked = (
        *(
            "What tools do you have?",
            "Which tools do you have?",
            "List your tools.",
            "What can you call?",
        ),
        *("Which tools can you call?", "Name your tools.", "Do you have tools?"),
    )
    return Round("tools", words.rng.choice(asked), "The user asks for my tools.", answer)


# ---- rounds without tools ------------------------------------------------------------------------

TALK = (  # tuples: what users say, a thought, the answer
    (
        "Hi|Hello|Hello!|Hi there|Hey|Good morning|hello|hi|Good evening!|Hi!|hey there|Say hello.",
        "The user greets me.",
        "Hello! What can I do for you?",
    ),
    (
        "Who are you?|What are you?|what is your name?|Introduce yourself.|"
        "Are you a language model?|What can you do?|Help|help me|What model is this?|"
        "Which model are you?|who are you|"
        "Are you a human?|Tell me about yourself.|What's your name?|What is this?",
        "The user asks what I am.",
        ABOUT,
    ),
    (
        "Thanks|Thank you|Thank you!|Thanks a lot.|thanks!|Great, thanks|Perfect, thank you.",
        "The user thanks me.",
        "You are welcome.",
    ),
    ("Bye|Goodbye|Good bye!|See you|bye!|Good night.", "The user leaves.", "Goodbye!"),
    (
        "How are you?|How are you today?|how is it going?|Are you well?|how are you",
        "The user asks how I am.",
        "I am well, thank you.",
    ),
    ("ok|Okay.|Fine.|I see.|Good.|Yes.|No.|Great!", "The user agrees.", "What else can I do?"),
)


def talk(words: Words) -> Round:
    asked, thought, answer = words.rng.choice((*TALK, *TALK[:2]))
    return Round("talk", words.rng.choice(asked.split("|")), f"{thought} I answer.", answer)


def said(words: Words) -> str:
    """Returns a text for the assistant to repeat: English words, or one to three values."""
    if words.chance(0.6):
        text = words.english()
        return f"{text} {words.english()}" if words.chance(0.1) else text
    return " ".join(words.text() for _ in range(words.rng.choice((1, 2, 3))))


def repeat(words: Words) -> Round:
    text = said(words)
    form = words.rng.choice(
        (
            *("Repeat: {}", "Say: {}", "Say: {}", 'Repeat "{}"', 'Say "{}"', "Echo: {}"),
            *("repeat after me: {}", "say: {}", "Please say: {}", "Repeat this: {}"),
        )
    )
    return Round("repeat", form.format(text), "The user wants me to repeat a text.", text)


def count(words: Words) -> Round:
    draw = words.rng.randint
    first = 1 if words.chance(0.7) else draw(2, 60)
    if words.chance(0.15):
        last = min(first + draw(0, 3), 100)
    else:
        last = draw(first, min(first + 20, 100) if words.chance(0.4) else 100)
    form = words.rng.choice(("Count from {} to {}.", "count from {} to {}", "Count {} to {}."))
    if first == 1:
        form = words.rng.choice(("Count to {1}.", "count to {1}", "Please count to {1}.", form))
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    text = form.format(first, last)
    return Round(
        "count", text, f"The user wants the numbers from {first} to {last}.", f"{numbers}."
    )


FACTS = (Words.text, Words.word, Words.integer, lambda words: words.english().rstrip(".,!?"))


def as_json(words: Words) -> Round:
    """Returns a round: the user asks for a JSON object with keys and values that the user names."""
    keys = [words.parameter() for _ in range(words.rng.choice((1, 2, 2, 3)))]
    facts = {key: words.rng.choice(FACTS)(words) for key in keys}
    phrase = ", ".join(f"{key} {text}" for key, text in facts.items())
    form = words.rng.choice(
        (
            "Write as JSON: {}",
            "As JSON: {}",
            "Answer in JSON: {}",
            "Give me JSON with {}",
            "JSON of {}",
        )
    )
    typed = {key: int(text) if text.isdigit() else text for key, text in facts.items()}
    typed = {key: facts[key] if facts[key][:1] == "0" else value for key, value in typed.items()}
    return Round("json", form.format(phrase), "The user wants JSON.", dumped(typed))


def in_object(words: Words) -> Round:
    """Returns a round whose answer is in a JSON object, as a schema of the request demands.

    The user's text does not mention the object. From such answers the model learns where a string
    in an object ends. All strings of an object have the same text.
    """
    inner = words.rng.choice((talk, talk, repeat, repeat, count, nameless))(words)
    if words.chance(0.4):
        inner = unfit(words, False)
    makers: tuple[Any, ...] = (inner.answer, inner.answer, inner.answer, 0, True)
    fields: dict[str, Any] = {words.parameter(): inner.answer}
    for _ in range(words.rng.choice((0, 0, 0, 1, 2))):
        fields[words.parameter()] = words.rng.choice(makers)
    if words.chance(0.2):
        fields = dict(reversed(fields.items()))
    # Each given part ends after the name of a field. There a grammar leaves a choice of tokens:
    # `": ` or `": "`. A later part begins without the quote before the name, because this quote is
    # in one token with the end of the value before.
    first, *others = fields
    if any(dumped(fields).count(key) > 1 for key in others):  # a text contains the name
        fields, others = {first: fields[first]}, []
    given = ['{"' + first, *others]
    if first == "name" and isinstance(fields[first], str):
        given[0] += '": "'  # `": "` is a single token
    if words.chance(0.35):  # any object; without a given part its rare beginning is trained
        fields, given = {"answer": inner.answer}, ['{"'] if words.chance(0.7) else []
    return Round(UNASKED, inner.user, inner.thought, dumped(fields), given=tuple(given))


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def introduction(words: Words) -> tuple[Round, Round]:
    """Returns two rounds: the user says a name, and later asks for it."""
    name, pick = words.person(), words.rng.choice
    first = pick(("My name is {}.", "I am {}.", "Hi, I'm {}.", "my name is {}", "Call me {}."))
    later = pick(ASKS_NAME)
    return (
        Round("name", first.format(name), "The user is " + name + ".", f"Hello, {name}!"),
        Round("name", later, f"The user is {name}.", f"Your name is {name}."),
    )


ASKS_NAME = (
    *(
        "What is my name?",
        "What's my name?",
        "Who am I?",
        "what is my name",
        "Do you know my name?",
    ),
    "Do you remember my name?",
)


def nameless(words: Words) -> Round:
    """Returns a question for a name that the user has not said."""
    return Round(
        "name", words.rng.choice(ASKS_NAME), "I do not know the name.", "I do not know it yet."
    )


# ---- conversations -------------------------------------------------------------------------------

SYSTEMS = tuple(
    """You are a helpful assistant.|Be brief.|Answer politely.|You are an assistant of a shop.
    |Answer in English.|You are a friendly assistant. Use the tools that you have.|Be kind.
    |You help users of a hotel.|Use tools where they help.|Never guess.|You are a bot.
    |You are a helpful assistant with access to functions.|Today is Monday.""".replace(
        "\n", ""
    ).split("|")
)


def system_text(words: Words) -> str:
    text: str = words.rng.choice(SYSTEMS).strip()
    if words.chance(0.2):
        text = f"You are an assistant for the {words.noun()} of {words.text()}. {text}"
    return text


def named_user(words: Words) -> tuple[str, Round]:
    """Returns a system message that names the user, and a question for the name."""
    name = words.person()
    form = words.rng.choice(("The user is {}.", "The user's name is {}.", "You talk to {}."))
    asked = words.rng.choice(ASKS_NAME)
    return form.format(name), Round("name", asked, f"The user is {name}.", f"Your name is {name}.")


ALONE: tuple[Callable[[Words], Round], ...] = (
    *(talk, talk, repeat, repeat, count, count, as_json, in_object, in_object),
)


def without_tools(words: Words) -> Conversation:
    rounds: list[Round] = []
    system = system_text(words) if words.chance(0.3) else ""
    known = False
    if words.chance(0.15):
        message, asks = named_user(words)
        system, known = f"{system} {message}".strip(), True
        rounds.append(asks)
    elif words.chance(0.2):
        first, later = introduction(words)
        rounds, known = [first, later], True
        if words.chance(0.5):
            rounds.insert(1, words.rng.choice(ALONE)(words))
    for _ in range(words.rng.choice((1, 2, 3))):
        kind = words.rng.random()
        if kind < 0.3:
            rounds.append(unfit(words, False))
        elif kind < 0.36:
            rounds.append(names_of_tools(words, ()))
        elif kind < 0.4 and not known:
            rounds.append(nameless(words))
        else:
            rounds.append(words.rng.choice(ALONE)(words))
    return thought_over(words, Conversation(tuple(rounds), system=system))


def with_tools(words: Words, makers: Sequence[Callable[[Words], Tool]] = ()) -> Conversation:
    """Returns a conversation with one to four tools, each by a random maker."""
    makers = makers or (*FAMILIES, *(drawn,) * 9)
    tools: list[Tool] = []
    many = words.chance(0.12)
    for _ in range(words.rng.randrange(4, 9) if many else words.rng.choice((1, 1, 2, 2, 3, 4))):
        tool = words.rng.choice(makers)(words)
        if all(_distinct(tool, other) for other in tools):
            tools.append(tool)
    rounds = [forced(words, tools) if words.chance(0.1) else use(words, words.rng.choice(tools))]
    for _ in range(words.rng.randrange(3, 7) if words.chance(0.1) else words.rng.randrange(4)):
        kind = words.rng.random()
        if kind < 0.64:
            rounds.append(use(words, words.rng.choice(tools)))
        elif kind < 0.74:
            rounds.append(forced(words, tools))
        elif kind < 0.86:
            rounds.append(_unfit_beside(words, tools))
        elif kind < 0.9:
            rounds.append(names_of_tools(words, tools))
        else:
            rounds.append(words.rng.choice((talk, talk, repeat, count))(words))
    words.rng.shuffle(rounds)
    system = system_text(words) if words.chance(0.3) else ""
    listed = tuple(schema(tool, words) for tool in tools)
    return thought_over(words, Conversation(tuple(rounds), listed, system))


def _distinct(tool: Tool, other: Tool) -> bool:
    if tool.family == other.family == "drawn":
        return tool.name != other.name
    if tool.family == other.family == "arithmetic":
        return tool.name[:3] != other.name[:3]
    return tool.family != other.family and tool.name != other.name


def _unfit_beside(words: Words, tools: Sequence[Tool]) -> Round:
    """Returns a round whose request fits none of these tools."""
    makers = [
        make for make in FAMILIES if make(words).family not in {tool.family for tool in tools}
    ]
    if makers and words.chance(0.6):
        asked = words.rng.choice(makers)(words).request(words)
        return Round(
            "unfit", altered(words, asked.user), "No tool of mine fits this.", NO_SUCH_TOOL
        )
    text = words.rng.choice((words.rng.choice(BEYOND), beyond(words), command(words)))
    return Round("unfit", text, "No tool of mine fits this.", NO_SUCH_TOOL)


def thought_over(words: Words, made: Conversation) -> Conversation:
    """Returns the conversation with random `thinks`: mostly all answers have thoughts, or none."""
    kind = words.rng.random()
    share = 0.0 if kind < 0.4 else 1.0 if kind < 0.75 else 0.5
    thinks = tuple(words.chance(share) for _ in made.rounds)
    return Conversation(made.rounds, made.tools, made.system, thinks)


def conversations(seed: int) -> Iterator[Conversation]:
    """Yields random conversations without end."""
    rng = random.Random(seed)
    words = Words(rng)
    while True:
        yield with_tools(words) if words.chance(0.75) else without_tools(words)
