"""Protects a new process from other users of the machine."""
