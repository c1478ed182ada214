"""Images in prompts: positions among the inputs, pixels, outputs of encoders.

Imports no MLX. `spans` has the positions of images, and decides where a chunk or a cached prefix
may end near an image. `image` has preprocessed images.
"""
