"""The conversations in the project's pages, examples and tests, and similar conversations."""

from __future__ import annotations

from typing import Any

from demo_chat.conversations import ABOUT, NO_TOOLS, Conversation, Round, dumped

REPEATS = "The user wants me to repeat a text."
FOUND = "The tool has answered. I say what it found."


def tool(name: str, description: str = "", **parameters: str) -> dict[str, Any]:
    """Returns a tool as the examples list it; `parameters` has the JSON type of each parameter."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": schema}}


ONE = (tool("get_weather", city="string"),)
THREE = (
    tool("get_weather", "Get the current weather of a city.", city="string"),
    tool("get_time", "Get the local time of a city.", city="string"),
    tool("add", "Adds two numbers.", a="number", b="number"),
)
STAYS = (
    tool("weather", city="string", days="integer"),
    tool("hotel", city="string", days="integer"),
)
WEATHER = "What is the weather in Lisbon?"


def counted(text: str, last: int) -> Round:
    answer = ", ".join(map(str, range(1, last + 1)))
    return Round("count", text, f"The user wants the numbers from 1 to {last}.", f"{answer}.")


def repeated(text: str, form: str = "Say: {}") -> Round:
    return Round("repeat", form.format(text), REPEATS, text)


def in_object(turn: Round, member: str) -> Round:
    """Returns the round with its answer in a JSON object, as a schema of the request demands.

    `member`: the key of the answer in the object.
    """
    begun = f'{{"{member}' + ('": "' if member == "name" else "")
    return Round("JSON", turn.user, turn.thought, dumped({member: turn.answer}), given=(begun,))


def called(
    user: str, task: str, name: str, arguments: dict[str, Any], result: str, answer: str
) -> Round:
    named = ", ".join(f"{key} {value}" for key, value in arguments.items())
    thought = f"The user asks for {task}. I call {name} with {named}."
    return Round("call", user, thought, answer, (name, arguments), result, FOUND)


def weather(
    city: str, result: str = '{"temperature": 18, "sky": "cloudy"}', said: str = ""
) -> Round:
    said = said or "temperature 18, sky cloudy"
    user, answer = f"What is the weather in {city}?", f"The weather in {city}: {said}."
    return called(user, f"the weather in {city}", "get_weather", {"city": city}, result, answer)


def forced(
    user: str, thought: str, name: str, arguments: dict[str, Any], *, named: bool = True
) -> Round:
    begun = '<tool_call>\n{"name": "'
    if named and arguments:
        begun += f'{name}", "arguments": {{"{next(iter(arguments))}'
    elif named:
        begun += f'{name}", "arguments'
    return Round("call", user, thought, "Done: ok.", (name, arguments), "ok", FOUND, (begun,))


def alone(*rounds: Round) -> Conversation:
    return Conversation(rounds)


WHO = Round("talk", "Who are you?", "The user asks what I am. I answer.", ABOUT)
SUM = called(
    *("What is 17 plus 25?", "17 plus 25", "add", {"a": 17, "b": 25}, "42", "17 plus 25 is 42."),
)
TIME = called(
    *("What time is it in Tokyo?", "the time in Tokyo", "get_time", {"city": "Tokyo"}, "09:30"),
    "The time in Tokyo: 09:30.",
)
HI = "The user greets me. I answer."

SHOWN = [
    *(alone(counted(f"Count to {n}.", n)) for n in (1, 2, 3, 5, 6, 10, 20, 30, 82, 90)),
    *(alone(counted(f"Count to {n}", n)) for n in (1, 2, 6, 82)),
    *(
        alone(repeated(text))
        for text in (
            *("it works", "it goes on", "it works, and so on", "hi", "hello world", "good morning"),
            *("It works!", "this works as well", "the cat is on the mat"),
        )
    ),
    alone(repeated("it works", "Repeat: {}")),
    alone(repeated("it works", 'Say "{}"')),
    alone(WHO),
    alone(WHO, repeated("it works")),
    alone(Round("talk", "Hi", HI, "Hello! What can I do for you?")),
    alone(Round("unfit", WEATHER, "I have no tools here.", NO_TOOLS)),
    *(
        alone(in_object(turn, key))
        for turn in (repeated("it works"), WHO, counted("Count to 3.", 3))
        for key in ("answer", "name")
    ),
    *(
        Conversation((weather("Lisbon"),), tools)
        for tools in (ONE, THREE, (THREE[0],), (THREE[0], THREE[2]))
    ),
    Conversation((weather("Paris", "18 degrees, sunny", "18 degrees, sunny"),), THREE),
    Conversation((SUM,), THREE),
    Conversation((SUM,), (THREE[0], THREE[2])),
    Conversation((TIME,), THREE),
    Conversation((WHO,), ONE),
    Conversation((repeated("it works"),), ONE),
    Conversation((forced("hi", HI, "get_weather", {"city": "hi"}),), ONE),
    Conversation((forced("Say: hi", REPEATS, "get_weather", {"city": "hi"}),), ONE),
    Conversation((forced("hi", HI, "list_files", {}),), (tool("list_files"),)),
    Conversation((forced("hi", HI, "hotel", {"city": "hi", "days": 0}),), STAYS),
    Conversation((forced("hi", HI, "weather", {"city": "hi", "days": 0}, named=False),), STAYS),
    Conversation(
        (forced(WEATHER, weather("Lisbon").thought, "get_time", {"city": "Lisbon"}),), THREE
    ),
]
