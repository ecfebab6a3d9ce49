"""`kvshelf bench characterize` and `heads`: which way to serve documents wins where, and what heads are like."""
