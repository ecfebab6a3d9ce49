"""The artifact: what remains of a document's KV cache after compression, its codecs, its identity and its blob."""
