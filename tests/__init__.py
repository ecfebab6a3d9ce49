"""The tests. The folders with a fixture of scope "package" are packages, and so must this one be: in any other folder
pytest keeps such a fixture until all tests have ended."""
