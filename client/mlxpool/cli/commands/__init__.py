"""One module for each command or group of commands, with `add_commands`.

`mlxpool.cli.main` imports only the module of the command that is given; no module imports another.
"""
