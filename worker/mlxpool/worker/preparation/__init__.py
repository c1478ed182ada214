"""Renders chats and tokenises texts in child processes with bounds.

A preparation has a known size, a place in a fair queue and limits of time and memory, and it can be
cancelled.
"""
