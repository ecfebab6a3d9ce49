"""The parts of `scripts/gpu.py`, one module each: `measure(part)` measures and writes its rows as it goes."""
