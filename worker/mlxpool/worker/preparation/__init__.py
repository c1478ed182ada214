"""Renders chats and tokenises texts in child processes with limits.

Each preparation waits in a fair queue and can be cancelled. Its time and memory are limited, and
its size is known.
"""
