"""A child whose results fill the pipe at its deadline: it waits for the worker, and not because it has stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.checker.runner import running

WORKER = Path(running.__file__).parent / "process"
# The worker is kept from reading until the time is over, as other programs on the processor may keep it.
RELAYED = """
import os, sys, time
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import main  # first: it finds what the others import

frames, written = os.pipe()
output, printed = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(frames), os.close(output)
    if sys.argv[2] == "writes":
        whole = main.struct.pack("<Q", 1 << 20) + bytes(1 << 20) + main.END_OF_FRAMES
        while whole:
            whole = whole[os.write(written, whole):]
    else:
        time.sleep(60)
    os._exit(0)
os.close(written), os.close(printed)
main.pace.slowness = lambda: time.sleep(0.1) or 1.0
late = [0.3]
main.sandboxed.excess = lambda limits: time.sleep(late.pop()) if late else None
child = SimpleNamespace(pid=pid, frames=frames, output=output, stacks=[open(os.devnull, "w+b")])
limits = {"seconds": 0.2, "memory_bytes": 0, "gpu": False, "output_bytes": 1 << 20}
worker = object.__new__(main._Worker)
worker.connection = SimpleNamespace(send_bytes=lambda *what: None)
ending = worker.relay(child, limits)
os.kill(pid, 9)
print(ending["timeout"], ending["whole"])
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("does, ends", [("writes", "False True"), ("sleeps", "True False")])
def test_only_a_child_that_has_nothing_to_say_is_stopped_by_the_clock(does, ends):
    command = [sys.executable, "-c", RELAYED, str(WORKER), does]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.split("\n")[0] == ends, done.stdout + done.stderr
