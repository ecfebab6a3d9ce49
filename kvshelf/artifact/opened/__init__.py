"""Caches that are open in a store: one that arrives layer by layer, and one of which parts are read."""
