"""Caches that cool are coded smaller: the rule, and what a home knows of it."""
