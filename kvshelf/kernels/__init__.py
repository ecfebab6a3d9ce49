"""The operations of compression and attachment: tensors in, tensors out.

One folder per operation. Its `__init__.py` defines the operation, with the least bytes and FLOPs it takes, and checks
its input. Its forms have functions of the same names, with the same arguments and results: `eager.py` uses torch's own
operations and runs on any device; `triton.py` holds fused kernels for CUDA, where they gain something. Where torch's
operations are slow on a CPU, `native.c` is the operation in C and `native.py` its caller. `compiling.py` compiles the
C; without a compiler `eager` runs instead. `dispatch.py` chooses the form. The naive forms, written to be read, are the
tests' oracles (`tests/kernels/references/`). Nothing here knows a model, a store or a process.
"""
