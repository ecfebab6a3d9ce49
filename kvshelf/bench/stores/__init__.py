"""What storing and reading a cache costs, beside the same bytes without kvshelf."""
