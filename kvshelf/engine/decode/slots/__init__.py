"""Decode steps that a card records."""
