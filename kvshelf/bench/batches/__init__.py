"""What a batch costs beside the work itself."""
