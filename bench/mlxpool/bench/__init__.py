"""What `mlxpool bench` measures: engine, end to end, broker, prefix cache; peers in turn."""
