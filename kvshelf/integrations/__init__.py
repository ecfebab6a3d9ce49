"""Parts of kvshelf that run inside of other engines, or speak to other programs."""
