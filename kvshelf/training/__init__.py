"""What is learned of a model before it compresses: gates, transforms, heads and chunks."""
