"""Weights that become plain ones, or others, while a model is loaded: of GGUF files, in int8, with an adapter."""
