"""Copies of caches before the home: in the memory of a process, and in a folder on a local disk."""
