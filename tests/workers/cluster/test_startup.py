"""Garbage collection while a process starts, and what Ray's workers import ahead. In a process of its own, because both
are a process's own."""

from __future__ import annotations

import os
import subprocess
import sys

STARTS = """
import gc, os, sys
from importlib import import_module

from kvshelf.workers.cluster import startup
from kvshelf.workers.cluster.connect import prepare_environment

usual = gc.get_threshold()
prepare_environment(None)
import_module(os.environ["RAY_preload_python_modules"])
print("ray.serve" in sys.modules, gc.get_threshold()[0] > 10 * usual[0], gc.get_freeze_count())
startup.end()
print(gc.get_threshold() == usual, gc.get_freeze_count() > 10_000)
"""


def test_a_worker_has_serve_before_its_first_task_and_collects_as_usual_once_it_has_started() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "RAY_preload_python_modules"}
    done = subprocess.run([sys.executable, "-c", STARTS], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "0", "True", "True"]
