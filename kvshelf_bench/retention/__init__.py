"""Which caches stay in a replica's memory: traces of agents against orders of leaving."""
