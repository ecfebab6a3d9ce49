"""Measurements: one command each, a table for people and JSON for machines. The service uses nothing from here."""
