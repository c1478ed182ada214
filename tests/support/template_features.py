"""Features of chat templates: for each feature a small template, its variables and its text.

Templates of real models use these features; the templates here are written for this table.
"""

from __future__ import annotations

from typing import Any

USER = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " one "},
    {"role": "assistant", "content": "<think>why</think>two"},
    {"role": "user", "content": "three"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "time?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a1", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
    },
    {"role": "tool", "tool_call_id": "a1", "name": "clock", "content": "12:00"},
]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]

FEATURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages, tokens and the generation prompt": (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        {"bos_token": "<s>"},
        "<s>[user]hi[assistant]",
    ),
    "blocks leave no white space": (
        "a\n  {% if true %}\nb\n  {% endif %}\nc",
        {},
        "a\nb\nc",
    ),
    "dashes take it away": (
        "{%- for m in messages -%}\n  {{- m.content -}}\n{%- endfor %}  .",
        {},
        "hi  .",
    ),
    "a namespace outlives the loop": (
        "{% set ns = namespace(seen=false, n=0) %}{% for m in messages %}"
        "{% set ns.seen = m.role == 'system' or ns.seen %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.seen }} {{ ns.n }}",
        {"messages": TALK},
        "True 4",
    ),
    "a variable set in a loop does not": (
        "{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}",
        {},
        "1",
    ),
    "macros with defaults": (
        "{% macro turn(role, text='-') %}<{{ role }}>{{ text }}{% endmacro %}"
        "{{ turn('user') }}{{ turn('user', text=messages[0].content) }}",
        {},
        "<user>-<user>hi",
    ),
    "a macro that calls itself": (
        "{% macro down(n) %}{{ n }}{% if n %}{{ down(n - 1) }}{% endif %}{% endmacro %}"
        "{{ down(3) }}",
        {},
        "3210",
    ),
    "a called block": (
        "{% macro box(n) %}[{{ caller(n) }}]{% endmacro %}"
        "{% call(n) box(2) %}{{ n * 2 }}{% endcall %}",
        {},
        "[4]",
    ),
    "loop.first, last, index0, index, length, previtem, nextitem": (
        "{% for m in messages %}{% if loop.first %}({% endif %}{{ loop.index0 }}{{ loop.index }}"
        "{{ loop.previtem.role[0] if loop.previtem else '-' }}"
        "{{ loop.nextitem.role[0] if loop.nextitem is defined else '.' }}"
        "{% if loop.last %}){{ loop.length }}{% else %},{% endif %}{% endfor %}",
        {"messages": TALK},
        "(01-u,12sa,23uu,34a.)4",
    ),
    "is defined, none, string, mapping, iterable": (
        "{{ nothing is defined }}{{ tools is none }}{{ messages[0].content is string }}"
        "{{ messages[0] is mapping }}{{ messages is iterable and messages is not string }}",
        {},
        "FalseTrueTrueTrueTrue",
    ),
    "the system message apart, the rest from 1": (
        "{% if messages[0]['role'] == 'system' %}{% set sys = messages[0].content %}"
        "{% set rest = messages[1:] %}{% endif %}"
        "{{ sys }}|{{ rest | length }}|{{ rest[-1].content }}",
        {"messages": TALK},
        "be brief|3|three",
    ),
    "slices backwards": (
        "{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}{{ 'abc'[:-1] }}",
        {"messages": TALK},
        "uausab",
    ),
    "filters: trim, upper, join, map, select, default, length, replace, first, last": (
        "{{ messages[1].content | trim }}{{ 'a' | upper }}"
        "{{ messages | map(attribute='role') | join('+') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ nothing | default('d') }}{{ 'a-b' | replace('-', '') }}"
        "{{ [1, 2] | first }}{{ [1, 2] | last }}",
        {"messages": TALK},
        "oneAsystem+user+assistant+user2dab12",
    ),
    "methods of text and maps": (
        "{% set c = messages[2].content %}"
        "{{ c.split('</think>')[-1] }}{{ c.startswith('<think>') }}"
        "{{ ' a '.strip() }}{{ 'x\\n'.rstrip('\\n') }}{{ {'a': 1}.get('b', 2) }}"
        "{% for k, v in {'k': 'v'}.items() %}{{ k }}={{ v }}{% endfor %}",
        {"messages": TALK},
        "twoTrueax2k=v",
    ),
    "tojson does not escape for HTML": (
        "{{ messages[0].content | tojson }}",
        {"messages": [{"role": "user", "content": '<é & "q">'}]},
        '"<é & \\"q\\">"',
    ),
    "tojson with an indent": (
        "{{ {'a': [1]} | tojson(indent=4) }}",
        {},
        '{\n    "a": [\n        1\n    ]\n}',
    ),
    "tojson with separators, sorted, in ASCII": (
        "{{ {'b': 'é', 'a': 1}"
        " | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}",
        {},
        '{"a":1,"b":"\\u00e9"}',
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool.function.name }}: "
        "{{ tool.function | tojson }}{% endfor %}{% endif %}",
        {"tools": TOOLS},
        'clock: {"name": "clock", "parameters": {"type": "object"}}',
    ),
    "tool calls and the tool's answer": (
        "{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}"
        "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
        "{% elif m.role == 'tool' %}<{{ m.tool_call_id }}>{{ m.content }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        {"messages": CALLS},
        'time?<call>clock {"zone": "UTC"}</call><a1>12:00',
    ),
    "content as text or as parts": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'text' %}({{ part.text }}){% endif %}"
        "{% endfor %}{% endif %}{% endfor %}",
        {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "hi(x)",
    ),
    "now, in UTC": ("{{ strftime_now('%Y-%m-%d %H:%M') }}", {}, "2023-11-14 22:13"),
    "now, where it is known": (
        "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% else %}"
        "{% set day = 'long ago' %}{% endif %}{{ day }}",
        {},
        "14 Nov 2023",
    ),
    "break and continue": (
        "{% for i in range(9) %}{% if i == 1 %}{%- continue %}{% endif %}"
        "{% if i == 3 %}{%- break %}{% endif %}{{ i }}{% endfor %}",
        {},
        "02",
    ),
    "a loop with a condition and an else": (
        "{% for m in messages if m.role == 'tool' %}x{% else %}none{% endfor %}",
        {},
        "none",
    ),
    "a loop in a loop": (
        "{% for tree in [[1, [2]]] recursive %}{% for t in tree %}{{ t }}{% endfor %}{% endfor %}",
        {},
        "1[2]",
    ),
    "the generation mark": (
        "{% generation %}x{{ messages | length }}{% endgeneration %}",
        {},
        "x1",
    ),
    "text put together": (
        "{{ 'a' ~ 1 ~ none }}{{ '-' * 3 }}{{ 2 ** 3 }}{{ 3 * 4 }}",
        {},
        "a1None---812",
    ),
    "a block kept in a variable": ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ x }}", {}, "a1a1"),
    "inline if without else": ("{{ 'a' if false }}{{ 'b' if true }}", {}, "b"),
    "roles in turn, or an exception": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
        {"messages": [*USER, {"role": "assistant", "content": "!"}]},
        "hi!",
    ),
}
