"""A batch at work: the Ray Data pipeline, each row's attempts, the journal and the counters."""
