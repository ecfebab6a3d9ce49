"""Rows in: files, patterns and object storage as a stream of documents."""
