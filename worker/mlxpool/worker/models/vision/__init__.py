"""The parts of models that read images besides the text part: image encoders, cross-attention.

The files have the names of the architectures; `preprocessing` reads preprocessor_config.json. They
import no text model. No MLX at run time.
"""
