"""Scores of answers as published benchmarks compute them, and by whole words."""
