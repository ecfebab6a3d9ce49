"""Erasures: everything of a subject goes, and a receipt says so."""
