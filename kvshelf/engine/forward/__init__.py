"""The forward pass of a model as lists of instructions between its attentions."""
