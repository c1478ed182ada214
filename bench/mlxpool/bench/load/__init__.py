"""Measures mixed load: requests of many lengths that arrive by themselves, through a whole server.

The same draw of lengths and arrivals is sent to the pool and to any server of OpenAI's completions.
"""
