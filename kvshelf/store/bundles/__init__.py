"""Bundles: exports of caches as one thing with a signature, laid out as OCI images are, in folders and buckets.

docs/internals/bundles.md describes the files and what a reader refuses.
"""
