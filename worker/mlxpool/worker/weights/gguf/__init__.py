"""Reads GGUF files, the format of llama.cpp, as the files of a model.

`header` reads the metadata and the places of tensors, `architectures` maps both to config.json and
to our names, `vocabulary` makes tokenizer.json, `blocks` turns llama.cpp's blocks into MLX's
layouts, `model` puts them together.
"""
