"""Batches: files whose lines become jobs, how far they are, and what is answered about them.

The job manager hands them what concerns batches and files.
"""
