"""Programs that are measured in processes of their own."""
