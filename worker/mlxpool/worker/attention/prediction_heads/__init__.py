"""Drafts of a model's own head (MTP): the head's passes, and its keys and values, if any."""
