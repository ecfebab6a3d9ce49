"""Which entries of a question and its answer stay behind the document: one suffix policy, one file."""
