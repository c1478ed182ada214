"""The `mlxpool` command."""
