"""Batches: files whose lines become jobs. Their progress, and answers to questions about them.

The job manager passes questions about batches and files on to this package.
"""
