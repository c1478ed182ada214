"""Batches: files whose lines become jobs, their progress, and the answers about them.

The job manager passes questions about batches and files on to this package.
"""
