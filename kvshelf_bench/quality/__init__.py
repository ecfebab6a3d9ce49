"""How well a model answers from what each policy keeps, and at how many bytes."""
