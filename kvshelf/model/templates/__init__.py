"""Chat templates: where they stand, what they write, and what thoughts look like in them."""
