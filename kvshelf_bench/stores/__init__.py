"""What storing and reading a cache costs, compared with the same bytes without kvshelf."""
