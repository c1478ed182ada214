"""Drafts of a model's own head (MTP): its passes, and its keys and values where it has some."""
