"""Policies that score by trained gates: small networks that read what a token has in a layer, and nothing later."""
