"""Parts of kvshelf that run inside of other engines."""
