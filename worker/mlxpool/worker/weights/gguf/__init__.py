"""Reads GGUF files, the format of llama.cpp, as the files of a model.

`header` reads the metadata and the positions of tensors, `architectures` maps both to config.json
and to our names, `vocabulary` makes tokenizer.json, `blocks` converts llama.cpp's blocks to MLX's
layouts, and `model` combines these modules.
"""
