"""Caches whose heads keep different numbers of entries, in pages of vLLM."""
