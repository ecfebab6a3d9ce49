"""The shelf: compressed caches, their bytes and identity, and the places that keep them.

Import from the modules. `artifact` imports nothing else of this package, and the engine imports only `artifact`.
"""
