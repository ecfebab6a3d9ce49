"""Work that a home records durably: requests, batches with their journals, and uploaded files."""
