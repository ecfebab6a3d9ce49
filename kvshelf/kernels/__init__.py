"""Tensors in, tensors out: the operations that compression and attachment are made of.

One folder per operation. Its `__init__.py` says what the operation computes, what it must read and do at least, and
checks its input; `reference.py` is the naive form, written to be read, and the oracle of the tests; `eager.py` is made
of torch's own operations and runs on any device; `triton.py` holds the fused kernels for CUDA. `dispatch.py` chooses.
Nothing here knows a model, a store or a process.
"""
