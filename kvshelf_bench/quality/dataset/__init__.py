"""The quality bench over documents of a file, with questions whose answers are known."""
