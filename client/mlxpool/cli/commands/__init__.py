"""One module for each command or group of commands, each with a function `add_commands`.

`mlxpool.cli.main` only imports the module of the given command. These modules do not import each
other.
"""
