"""Fixtures of a shelf in a folder."""

from tests.store.conftest import clock, home, store

__all__ = ["clock", "home", "store"]
