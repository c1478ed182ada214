"""Finds and reads model folders, on a thread and in a child process.

A slow disk delays no stream, and nothing in a model's files can harm the broker.
"""
