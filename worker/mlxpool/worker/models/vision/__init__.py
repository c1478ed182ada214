"""The image encoders of models, one a file, and how models get images.

They import no text model. No MLX at run time.
"""
