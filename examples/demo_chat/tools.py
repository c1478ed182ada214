"""Tools for demo-chat's training: schemas, requests, results and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo_chat.words import ADJECTIVES, RESULT_KEYS, VERBS, Words, words_of

GETTERS = ("get", "find", "show", "read", "check", "list", "look up", "tell me")
BARE = ("result", "sum", "value", "time")  # keys that an answer leaves out
NUMBER_WORDS = words_of("zero one two three four five six seven eight nine ten eleven twelve")
UNITS = words_of(
    """metres kilometres miles feet inches yards grams kilograms pounds ounces litres gallons cups
    celsius fahrenheit kelvin seconds minutes hours days euros dollars yen francs km kg lb cm m"""
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool. `choices` are the values of an enum, otherwise empty."""

    name: str
    type: str = "string"
    description: str = ""
    required: bool = True
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request for one tool. `subject`: the answer's first words, up to a colon or verb."""

    user: str
    task: str  # the request in the words of a thought: the weather in Lisbon
    arguments: Mapping[str, Any]
    result: str
    subject: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and the requests for it."""

    family: str
    name: str
    description: str
    parameters: tuple[Parameter, ...]
    request: Callable[[Words], Request]


def schema(tool: Tool, words: Words) -> dict[str, Any]:
    """Returns the tool as a request lists it, in a random one of the forms that clients send."""
    properties = {parameter.name: _property(parameter, words) for parameter in tool.parameters}
    required = [parameter.name for parameter in tool.parameters if parameter.required]
    late = words.chance(0.7)
    parameters: dict[str, Any] = {"type": "object"}
    if required and not late:
        parameters["required"] = required
    parameters["properties"] = properties
    if required and late and words.chance(0.85):
        parameters["required"] = required
    if words.chance(0.1):
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def _property(parameter: Parameter, words: Words) -> dict[str, Any]:
    definition: dict[str, Any] = {"type": parameter.type}
    if parameter.choices:
        definition["enum"] = list(parameter.choices)
    if parameter.description or words.chance(0.05):
        definition["description"] = parameter.description
        if words.chance(0.15):
            definition = dict(reversed(definition.items()))
    return definition


# ---- results and answers -------------------------------------------------------------------------


def flat(result: str) -> str:
    """Returns a tool's result as an answer says it: `temperature 18, sky cloudy` for a JSON map."""
    try:
        value = json.loads(result)
    except ValueError:
        return result
    if isinstance(value, Mapping):
        if len(value) == 1 and next(iter(value)) in BARE:
            return flat(json.dumps(next(iter(value.values()))))
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(each) for each in value)
    return _plain(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def result_of(words: Words, *scalars: str) -> str:
    """Returns a result: one of the scalars, a JSON map, or a list."""
    kind = words.rng.random()
    if kind < 0.5:
        value: Any = _typed(words.rng.choice(scalars))
        return value if isinstance(value, str) and words.chance(0.8) else json.dumps(value)
    if kind < 0.95:
        keys = {words.either(RESULT_KEYS, 0.3) for _ in range(words.rng.choice((1, 2, 2, 3)))}
        values = (words.text, words.word, words.integer, words.integer, words.decimal)
        fields = {key: _typed(words.rng.choice(values)()) for key in sorted(keys)}
        if words.chance(0.3):
            fields = {words.rng.choice(BARE): _typed(words.rng.choice(scalars))}
        return json.dumps(fields)
    return json.dumps([words.word() for _ in range(words.rng.choice((2, 3)))])


def _typed(value: str) -> Any:
    """Returns digits as a number, other text unchanged."""
    try:
        return json.loads(value) if value[:1].isdigit() else value
    except ValueError:
        return value


# ---- the known families --------------------------------------------------------------------------


def weather(words: Words) -> Tool:
    pick = words.rng.choice
    name = pick(
        words_of(
            "get_weather weather current_weather getWeather fetch_weather weather_in"
            " get_current_weather check_weather get_temperature"
        )
    )
    place = Parameter(
        pick(("city", "location", "place", "town", "city_name")),
        description=pick(("", "", "The city.", "Name of the city", "The city, for example Paris")),
    )
    unit = Parameter("unit", "string", pick(("", "Unit of the temperature")), False, TEMPERATURES)
    parameters = (place, unit) if words.chance(0.25) else (place,)
    about = (
        "",
        "The weather of a city.",
        "Get the current weather in a given location",
        "Returns the weather in a city.",
        "Look up the weather",
        f"Weather by {place.name}.",
    )

    def request(words: Words) -> Request:
        city, pick = words.city(), words.rng.choice
        form = pick(
            (
                *("What is the weather in {}?", "What's the weather like in {} today?"),
                *("weather in {}", "How is the weather in {}?", "Will it rain in {}?"),
                *("Is it warm in {}?", "What is the temperature in {}?", "{} weather"),
                *("Tell me the weather in {}.", "How warm is it in {} now?"),
                *("What is the weather in {} right now?", "Do I need an umbrella in {}?"),
                *("I am in {}. What is the weather?", "What's the weather like in {}?"),
            )
        )
        arguments = {place.name: city}
        text = form.format(city)
        if len(parameters) == 2 and words.chance(0.6):
            arguments["unit"] = pick(TEMPERATURES)
            text = (
                f"{text.rstrip('?.')} in {arguments['unit']}{text[-1] if text[-1] in '?.' else ''}"
            )
        sky = pick(ADJECTIVES)
        degrees = words.rng.randrange(-9, 40)
        result = pick(
            (
                f"{degrees} degrees, {sky}",
                f"{sky}, {degrees} degrees",
                f"{degrees}",
                f"{sky}",
                json.dumps({"temperature": degrees, "sky": sky}),
                json.dumps({pick(("city", "location")): city, "temperature": degrees}),
                json.dumps({"temperature": degrees, "unit": pick(TEMPERATURES), "wind": sky}),
                result_of(words, sky, str(degrees)),
            )
        )
        return Request(text, f"the weather in {city}", arguments, result, f"The weather in {city}:")

    return Tool("weather", name, pick(about), parameters, request)


TEMPERATURES = ("celsius", "fahrenheit")


def clock(words: Words) -> Tool:
    pick = words.rng.choice
    place = Parameter(
        pick(("place", "city", "location", "zone", "timezone")),
        description=pick(("", "", "A city", "Where")),
    )
    name = pick(words_of("get_time time_in current_time getTime get_current_time clock local_time"))
    about = ("", "The time in a place.", "Get the local time of a city", "Current time by place")

    def request(words: Words) -> Request:
        city, pick = words.city(), words.rng.choice
        form = pick(
            (
                *("What time is it in {}?", "What is the time in {}?", "time in {}"),
                *("How late is it in {}?", "Tell me the time in {}.", "What time is it now in {}?"),
                *("what time is it now in {}", "What's the local time in {}?"),
            )
        )
        result = pick((words.clock(), json.dumps({"time": words.clock()})))
        if words.chance(0.3):
            result = result_of(words, words.clock())
        text = form.format(city)
        return Request(
            text, f"the time in {city}", {place.name: city}, result, f"The time in {city}:"
        )

    return Tool("time", name, pick(about), (place,), request)


OPERATIONS = (  # names, the word between them, other forms of the request, the description's verb
    ("add", "plus", ("add {} and {}", "{} + {}", "the sum of {} and {}"), "Adds"),
    ("subtract", "minus", ("{} - {}", "take {1} from {0}", "subtract {1} from {0}"), "Subtracts"),
    ("multiply", "times", ("multiply {} by {}", "{} * {}", "{} x {}"), "Multiplies"),
    ("divide", "divided by", ("divide {} by {}", "{} / {}"), "Divides"),
)


def arithmetic(words: Words) -> Tool:
    pick = words.rng.choice
    verb, between, forms, verbs = pick((OPERATIONS[0], *OPERATIONS))
    kind = pick(("integer", "integer", "number"))
    names = pick((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    parameters = tuple(
        Parameter(name, kind, about)
        for name, about in zip(
            names, pick((("", ""), ("", ""), ("First number", "Second number"))), strict=True
        )
    )
    name = verb + pick(("", "", "_numbers", "_two_numbers"))
    about = ("", f"{verbs} two numbers.", f"{verbs} {names[0]} and {names[1]}")

    def request(words: Words) -> Request:
        pick = words.rng.choice
        shown = [words.integer() for _ in names]
        if kind == "number" and words.chance(0.4):
            shown = [words.decimal() for _ in names]
        values = shown
        if words.chance(0.1):
            values = [str(words.rng.randrange(13)) for _ in names]
            shown = [NUMBER_WORDS[int(value)] for value in values]
        form = pick((f"What is {{}} {between} {{}}?", f"{{}} {between} {{}}", *forms))
        if words.chance(0.3) and form in forms and form[0] != "{":
            form = pick(("Please {}.", "Can you {}?")).format(form)
        text = form.format(*shown)
        said = f"{values[0]} {between} {values[1]}"
        arguments = {n: _typed(v) for n, v in zip(names, values, strict=True)}
        result = words.decimal() if words.chance(0.2) else words.integer()
        if words.chance(0.3):
            result = json.dumps({pick(("result", "sum", "value")): _typed(result)})
        return Request(text[:1].upper() + text[1:], said, arguments, result, f"{said} is")

    return Tool("arithmetic", name, pick(about), parameters, request)


def conversion(words: Words) -> Tool:
    pick = words.rng.choice
    value, source, target = pick(
        (
            ("value", "from_unit", "to_unit"),
            ("amount", "from", "to"),
            ("value", "unit", "target"),
            ("number", "from_unit", "to_unit"),
        )
    )
    parameters = (Parameter(value, "number"), Parameter(source), Parameter(target))
    name = pick(words_of("convert convert_units unit_converter convertUnits unit_convert"))
    about = ("", "Convert a value to another unit.", "Converts units", "Unit conversion")

    def request(words: Words) -> Request:
        pick = words.rng.choice
        amount = pick((words.integer, words.integer, words.decimal))()
        old, new = (words.either(UNITS, 0.25) for _ in range(2))
        form = pick(
            (
                *("Convert {0} {1} to {2}.", "convert {0} {1} to {2}", "{0} {1} in {2}"),
                *("How many {2} are {0} {1}?", "What is {0} {1} in {2}?", "{0} {1} to {2} please"),
                *("How many {2} is {0} {1}?", "I need {0} {1} in {2}."),
            )
        )
        arguments = {value: _typed(amount), source: old, target: new}
        result = pick((words.decimal, words.integer))()
        if words.chance(0.4):
            result = result_of(words, result, f"{result} {new}")
        said = f"{amount} {old} in {new}"
        return Request(form.format(amount, old, new), said, arguments, result, f"{said}:")

    return Tool("conversion", name, pick(about), parameters, request)


def user_lookup(words: Words) -> Tool:
    pick = words.rng.choice
    key = Parameter(
        pick(("name", "user", "id", "user_id", "query", "username")),
        description=pick(("", "", "Name or number of the user")),
    )
    name = pick(
        words_of("find_user get_user lookup_user user_info look_up_user getUser search_users")
    )
    about = ("", "Look up a user.", "Finds a user by name or number", "Returns facts of a user")

    def request(words: Words) -> Request:
        who = words.rng.choice((words.person, words.person, words.code, words.mail))()
        form = words.rng.choice(
            (
                *("Look up the user {}.", "look up {}", "Who is {}?", "find user {}"),
                *("Show me the user {}.", "Who is the user {}?", "Find the user {}, please."),
                *("What do you know about user {}?", "Get me {}."),
            )
        )
        result = json.dumps({"name": words.person(), "mail": words.mail()})
        if words.chance(0.7):
            result = result_of(words, words.person(), words.mail(), words.code())
        return Request(form.format(who), f"the user {who}", {key.name: who}, result, f"User {who}:")

    return Tool("user", name, pick(about), (key,), request)


def message(words: Words) -> Tool:
    pick = words.rng.choice
    to, text = pick((("to", "text"), ("recipient", "message"), ("to", "body"), ("user", "text")))
    what = pick(("message", "mail", "note", "text"))
    name = pick(("send_{}", "{}_send", "send_{}_to")).format(what)
    about = ("", f"Send a {what}.", f"Sends a {what} to somebody")

    def request(words: Words) -> Request:
        who = words.rng.choice((words.person, words.person, words.mail))()
        said = " ".join(words.word() for _ in range(words.rng.choice((1, 2, 3, 4))))
        form = words.rng.choice(
            (
                f'Send {{0}} the {what} "{{1}}".',
                'send "{1}" to {0}',
                f"Send a {what} to {{0}}: {{1}}",
                f'{what} {{0}}: "{{1}}"',
            )
        )
        result = words.rng.choice(("sent", "ok", "delivered", '{"status": "sent"}', words.code()))
        return Request(
            form.format(who, said), f"a {what} to {who}", {to: who, text: said}, result, "Done:"
        )

    return Tool("message", name, pick(about), (Parameter(to), Parameter(text)), request)


FAMILIES = (weather, clock, arithmetic, conversion, user_lookup, message)


# ---- tools with drawn names ----------------------------------------------------------------------


def drawn(words: Words) -> Tool:
    """Returns a tool with a random name, parameters and description."""
    pick = words.rng.choice
    verb, noun = words.verb(), words.noun()
    if words.chance(0.3):
        verb = pick(("get", "find"))
    names = list({words.parameter() for _ in range(pick((0, 1, 1, 1, 2, 2, 3)))})
    parameters = tuple(
        _drawn_parameter(words, name, noun, n) for n, name in enumerate(sorted(names))
    )
    described = words.chance(0.75)
    name = _drawn_name(words, verb, noun, meaningless=described and words.chance(0.2))
    about = ""
    if described:
        first = parameters[0].name.replace("_", " ") if parameters else "day"
        about = pick(
            (
                *("{V} the {n}.", "{V} the {n} of a {p}.", "Use this to {v} a {n}.", "{V} {n}"),
                *("{V} a {n} by {p}", "Can {v} the {n}.", "{V} the {n}. Needs the {p}."),
            )
        ).format(V=verb.capitalize(), v=verb, n=noun, p=first)
    getter = verb in GETTERS

    def request(words: Words) -> Request:
        return _drawn_request(words, name, verb, noun, parameters, getter)

    return Tool("drawn", name, about, parameters, request)


def _drawn_name(words: Words, verb: str, noun: str, meaningless: bool) -> str:
    if meaningless:
        return f"{words.invented()}{words.rng.choice(('', '_' + words.invented()))}"
    parts = [*verb.split(), *noun.split()]
    if words.chance(0.15):
        parts = [*noun.split(), *verb.split()]
    if words.chance(0.2):
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "_".join(parts)


def _drawn_parameter(words: Words, name: str, noun: str, position: int) -> Parameter:
    kind = words.rng.choice(("string",) * 6 + ("integer", "integer", "number", "boolean"))
    shown = name.replace("_", " ")
    about = words.rng.choice(("", "", "", "The {}.", "{} of the {}", "Which {}", "the {} to use"))
    choices: tuple[str, ...] = ()
    if kind == "string" and words.chance(0.1):
        choices = tuple(sorted({words.word() for _ in range(3)}))
    required = position == 0 or words.chance(0.6)
    return Parameter(name, kind, about.format(shown, noun), required, choices)


def _value(words: Words, parameter: Parameter) -> str:
    if parameter.choices:
        return words.rng.choice(parameter.choices)
    makers: dict[str, Callable[[], str]] = {
        "string": words.text,
        "integer": words.integer,
        "number": words.rng.choice((words.decimal, words.integer)),
        "boolean": lambda: words.rng.choice(("true", "false")),
    }
    return makers[parameter.type]()


CLAUSES = ("{} {}", "{} {}", "{} {}", "{} = {}", "{}: {}", "the {} {}", "{1} as {0}", '{} "{}"')
DIRECT = ("{V} the {n}", "{V} {n}", "{V} a {n}", "Please {v} the {n}", "Can you {v} the {n}")
ASKED = ("What is the {n}", "What's the {n}", "{V} the {n}", "Show me the {n}", "Tell me the {n}")
EXPLICIT = ("Call {name}", "Use {name}", "Run {name}", "call the tool {name}")


def _drawn_request(
    words: Words, name: str, verb: str, noun: str, parameters: Sequence[Parameter], getter: bool
) -> Request:
    rng = words.rng
    given = [parameter for parameter in parameters if parameter.required or words.chance(0.5)]
    values = {parameter.name: _value(words, parameter) for parameter in given}
    explicit = words.chance(0.12)
    forms = EXPLICIT if explicit else ASKED if getter else DIRECT
    form = rng.choice(forms)
    text = form.format(V=verb.capitalize(), v=verb, n=noun, name=name)
    rest = list(given)
    of = ""
    if rest and not explicit and rest[0].type != "boolean" and words.chance(0.6):
        first = rest.pop(0)
        of = f" {rng.choice(('of', 'for', 'of', 'for', 'of the ' + _shown(words, first)))}"
        of += f" {values[first.name]}"
        text += of
    if rest and words.chance(0.25):
        rng.shuffle(rest)
    if rest:
        text += rng.choice((" with ", " with ", ": ", ", ")) + _enumerated(
            [_clause(words, parameter, values[parameter.name]) for parameter in rest]
        )
    asks = form.startswith(("What", "Can"))
    text += rng.choice(("?", "?", "?", "")) if asks else rng.choice((".", ".", "", " please"))
    arguments = {
        parameter.name: values[parameter.name]
        if parameter.type == "string"
        else json.loads(values[parameter.name])
        for parameter in given
    }
    scalars = (words.word(), words.integer(), words.text(), words.decimal())
    result = result_of(words, *scalars)
    task = f"the {noun}{of}"
    if getter and not explicit:
        return Request(text, task, arguments, result, f"The {noun}{of}:")
    result = rng.choice(("ok", "done", '{"ok": true}')) if words.chance(0.3) else result
    return Request(text, task if not explicit else name, arguments, result, "Done:")


def _shown(words: Words, parameter: Parameter) -> str:
    return parameter.name.replace("_", " ") if words.chance(0.5) else parameter.name


def _clause(words: Words, parameter: Parameter, value: str) -> str:
    form = words.rng.choice(CLAUSES)
    if parameter.type != "string" and '"' in form:
        form = "{} {}"
    return form.format(_shown(words, parameter), value)


def _enumerated(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def command(words: Words) -> str:
    """Returns a user's request of random words, which fits no tool of the conversation."""
    verb, noun = words.rng.choice(VERBS), words.noun()
    return words.rng.choice(
        (f"{verb} the {noun} of {words.text()}", f"What is the {noun} of {words.text()}?")
    )
