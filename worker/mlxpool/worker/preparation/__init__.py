"""Renders chats and tokenises texts in child processes with limits.

A preparation waits in a queue that is fair between owners, and can be cancelled. Its time and
memory are limited.
"""
