"""Chat templates: their files, the text that they write, and the marks of thoughts in them."""
