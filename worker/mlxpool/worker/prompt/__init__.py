"""From a request to token ids, and from token ids to text."""
