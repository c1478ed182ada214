"""From a model's files to weights in memory, and what is wrong with them."""
