"""Renders chats and tokenises texts in child processes with limits.

Each preparation waits in a fair queue. Its size is known, its time and memory are limited, and it
can be cancelled.
"""
