"""Measurements: one command each, a table for people and JSON for machines. Nothing here is used by the service."""
