"""One module for each command or group of commands, with `add_commands`.

`mlxpool.cli.main` imports only the module of the given command. No module imports another module.
"""
