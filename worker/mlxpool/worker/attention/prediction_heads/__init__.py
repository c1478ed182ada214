"""Drafts of a model's own head (MTP): its passes, and its keys and values if it has a cache."""
