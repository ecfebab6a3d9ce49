"""`scripts/gpu.py --record`: what the part `answers` compares with."""

from __future__ import annotations

from scripts.gpu_parts.answers import record

if __name__ == "__main__":
    record()
