"""Attention over a compressed cache, inside a transformers model."""
