"""What models that read images have beside their text part: image encoders, cross-attention.

The files have the names of the architectures; `preprocessing` reads preprocessor_config.json. They
import no text model. No MLX at run time.
"""
