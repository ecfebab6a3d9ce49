"""Batches: a corpus of documents in, one line out for each, with its cache or its error.

`row` defines the row, its shards and the journal; `input` reads rows from files, `run` compresses their documents,
`output` writes the results; `plan` computes what a corpus costs. Only `run.run` and `run.pipeline` import Ray.
"""
