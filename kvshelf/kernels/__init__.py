"""Tensors in, tensors out: the operations that compression and attachment are made of.

One folder per operation. `reference.py` is the naive form, written to be read, and the oracle of the tests; `eager.py`
is the form in use, out of torch's own operations, on any device. Nothing here knows a model, a store or a process.
"""
