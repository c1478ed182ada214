"""Images in prompts: places among the inputs, pixels, outputs of encoders.

Imports no MLX. `spans` has the places of images and the rules for cuts, `image` has preprocessed
images.
"""
