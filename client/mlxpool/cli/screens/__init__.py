"""What commands draw on a terminal again and again, as `top` and `stats --watch` do."""
