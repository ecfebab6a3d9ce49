"""Tensor parallel: one engine whose model several processes share, each with some of its heads."""
