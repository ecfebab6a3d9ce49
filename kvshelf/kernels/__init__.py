"""Tensors in, tensors out: the operations that compression and attachment are made of.

One folder per operation. Its `__init__.py` says what the operation computes, what it must read and do at least, and
checks its input; `reference.py` is the naive form, written to be read, and the oracle of the tests; `eager.py` is made
of torch's own operations and runs on any device; `triton.py` holds the fused kernels for CUDA. Where torch's operations
are slow on a CPU, `native.c` is the operation in C and `native.py` its caller; `compiling.py` compiles them, where a C
compiler is, and without one all falls to `eager`. `dispatch.py` chooses. Nothing here knows a model, a store or a
process.
"""
