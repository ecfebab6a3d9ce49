"""Processes: the supervisor, the server, and the replicas they start."""
