"""Weights that are changed while a model is loaded: unpacked, converted from GGUF, rounded to int8, with an adapter."""
