"""Searches over the summaries of a tenant's caches."""
