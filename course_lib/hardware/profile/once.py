"""Under ncu: one warm call of a function, between the profiler's start and stop. `python -m ...profile.once JOB`."""

import pickle
import sys
from pathlib import Path


def main(job: Path) -> None:
    import torch

    from course_lib.hardware.meter.elsewhere import found

    wanted = pickle.loads(job.read_bytes())
    function = found(wanted, job.parent)
    for _ in range(2):
        function(*wanted["arguments"], **wanted["named"])
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    function(*wanted["arguments"], **wanted["named"])
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
