"""A pool on a Ray cluster: `mlxpool ray up pool.toml` (docs/scale.md).

Two kinds of Ray actors run the commands that an operator would start by hand. `broker_host` runs
`mlxpool broker` on the machine of the store. Each `worker_host` runs one `mlxpool worker` on any
machine where Ray has room. Only `ray_cluster` imports Ray; `plan` decides without I/O.
"""
