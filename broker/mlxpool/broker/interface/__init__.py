"""What the edge tells the core (events) and what the core decides (actions).

Frozen records without behaviour.
"""
