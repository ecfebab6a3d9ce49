"""Child processes for tests, forked from this one: a fresh interpreter would spend seconds importing torch."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


class Child:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit status, negative for the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait_until_stopped(self) -> None:
        """Until a SIGSTOP has stopped it."""
        deadline = time.monotonic() + 280
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "the child has not stopped"
            time.sleep(0.01)


def start_child(work: Callable[[], None]) -> Child:
    """Fork and do `work` in the child, which must open a store of its own. A child that hangs is ended by an alarm."""
    pid = os.fork()
    if pid:
        return Child(pid)
    status = 1
    try:
        signal.alarm(280)
        gc.freeze()  # garbage of the parent's, a group of processes say, would be collected here without its threads
        torch.set_num_threads(1)  # the other threads of torch's pool do not exist in a fork, and would be waited for
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # no clean-up of pytest's in the child


def run_in_child(work: Callable[[], None]) -> None:
    status = start_child(work).wait()
    assert status == 0, f"the child ended with {status}; its traceback is in the output"
