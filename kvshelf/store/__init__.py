"""The shelf: compressed caches, their bytes and identity, and the places that keep them.

Import from the modules: `artifact` stands below everything else here, and the engine uses nothing but it.
"""
