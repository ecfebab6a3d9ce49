"""How fast prefill, compression, first token and decoding are, compared with other software."""
