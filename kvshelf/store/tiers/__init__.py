"""Copies of caches in front of the home: in the memory of a process, and in a folder on a local disk."""
