"""Results out: the output file and the report."""
