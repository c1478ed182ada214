"""One step of a model: rows in memory, attention, the draw of a token."""
