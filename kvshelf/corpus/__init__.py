"""Batches: a corpus of documents in, one line out for each, with its cache or its error.

`row` has the row, the shards it is read from and the journal; `input` makes rows of files, `run` compresses them,
`output` writes the results; `plan` computes what a corpus costs. Only `run.run` and `run.pipeline` import Ray.
"""
