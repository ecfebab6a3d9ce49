"""How fast prefill, compression, first token and decoding are, beside the peers."""
