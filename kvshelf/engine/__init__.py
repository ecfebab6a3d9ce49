"""The engine: one model on one device. It compresses documents and answers questions; no Ray, no HTTP."""
