"""Caches as files of other engines: llama.cpp's state of a sequence, mlx-lm's prompt cache."""
