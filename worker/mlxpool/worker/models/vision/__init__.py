"""Image encoders and cross-attention: the parts of models that read images.

The files have the names of the architectures; `preprocessing` reads preprocessor_config.json. These
files import no text model, and no MLX at run time.
"""
