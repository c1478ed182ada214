"""The broker's decisions as a pure state machine: an event and a time in, actions out.

Nothing here does I/O, reads a clock or draws a random number.
"""
