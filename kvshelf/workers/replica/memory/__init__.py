"""Caches in the memory of a replica: which stay, and for how long."""
