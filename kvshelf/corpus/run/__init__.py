"""A batch at work: the pipeline on Ray, each row's attempts, the journal and the counters."""
