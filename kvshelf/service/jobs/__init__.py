"""Work that outlives its HTTP request: background creations and batches."""
