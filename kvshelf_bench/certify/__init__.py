"""Whether certificates keep what they say, over splits of graded documents."""
