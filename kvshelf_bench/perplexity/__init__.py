"""Perplexity of a text behind compressed beginnings and under suffix policies."""
