"""The parts of models that read images besides the text part: image encoders, cross-attention.

The files have the names of the architectures; `preprocessing` reads preprocessor_config.json. These
files import no text model, and no MLX at run time.
"""
