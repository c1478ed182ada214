"""The engine of encoder models: it computes vectors of texts, without a cache or a next token."""
