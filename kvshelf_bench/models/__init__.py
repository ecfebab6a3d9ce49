"""`kvshelf bench models`: which model types of transformers kvshelf takes, tried with a small random model of each."""
