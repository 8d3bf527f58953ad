"""Numbers sent to the GPU while it is busy: each arrives as it was written, and the host need not wait for it."""

import time

import torch

from course_lib.hardware.staging import BLOCKS, Staging

BUSY = 20_000_000  # clock cycles: about 10 ms


def test_each_send_arrives_as_written_and_the_host_is_some_sends_ahead():
    target = torch.zeros(1024, dtype=torch.int64, device="cuda")
    staging, arrived, waited = Staging(target), [], []
    torch.cuda.synchronize()
    for number in range(3 * BLOCKS):
        start = time.perf_counter()
        torch.cuda._sleep(BUSY)
        staging.blocks[staging.take()].fill_(number)
        staging.send()
        arrived.append(target.clone())
        waited.append(time.perf_counter() - start)
    assert [int(numbers.unique()) for numbers in arrived] == list(range(3 * BLOCKS))
    assert max(waited[1:BLOCKS]) < 0.005 < max(waited[BLOCKS:]), "it waits when it is as many sends ahead, not before"
