"""What a batch costs in addition to the work itself."""
