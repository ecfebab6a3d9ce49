"""The room of the corpora: many documents in, one row out for each, a cache or an error.

`rows` are documents to compress, `sources` where they come from, `results` what became of them, `progress` what is
known meanwhile, and `run` is the work. Only `run`, `pipeline` and `callers` import Ray.
"""
