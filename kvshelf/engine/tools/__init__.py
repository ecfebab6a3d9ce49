"""Calls of tools: how templates write them, and how answers are read."""
