"""Draws what commands such as `top` and `stats --watch` refresh on a terminal."""
