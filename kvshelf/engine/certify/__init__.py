"""A bound of how many of a user's questions a compressed cache answers otherwise, from graded questions."""
