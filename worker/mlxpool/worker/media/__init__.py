"""Images in prompts: their places among the inputs, their pixels, the outputs of encoders.

Imports no MLX. `spans` says where images stand and what may cut them, `image` what a model's
preprocessing makes of one.
"""
