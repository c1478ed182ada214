"""Who may come in, as what, and how much of it."""
