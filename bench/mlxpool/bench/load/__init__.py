"""Measures mixed load: requests of many lengths arrive at random times at a whole server.

The same random lengths and arrivals are sent to the pool and to any server of OpenAI's completions.
"""
