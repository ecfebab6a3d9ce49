"""One forward over a document, and what each layer of it is reduced to."""
