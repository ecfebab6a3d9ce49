"""Documents that grow and conversations that last: what an append and a turn cost, and what they lose."""
