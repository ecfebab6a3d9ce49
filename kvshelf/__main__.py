"""`python -m kvshelf` is the command line."""

from kvshelf.cli import main

if __name__ == "__main__":
    main()
