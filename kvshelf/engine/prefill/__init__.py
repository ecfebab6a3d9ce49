"""The prefill of a document, and the reduction of each of its layers."""
