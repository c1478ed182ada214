"""Images in prompts: positions among the inputs, pixels, outputs of encoders.

Imports no MLX. `spans` has the positions of images and the rules for cuts; `image` has preprocessed
images.
"""
