"""Images in prompts: places among the inputs, pixels, outputs of encoders.

Imports no MLX. `spans` says where images stand and what may cut them, `image` what a model's
preprocessing makes of one.
"""
