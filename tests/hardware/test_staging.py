"""Without a GPU a copy is done when it returns: one block will do."""

import torch

from course_lib.hardware.staging import StagedFields, Staging


def test_what_was_written_is_sent():
    target = torch.zeros(3, dtype=torch.int64)
    staging = Staging(target)
    for number in range(3):
        block = staging.blocks[staging.take()]
        block[number] = number + 1
        staging.send()
        assert target.tolist() == [1, 2, 3][: number + 1] + [0] * (2 - number)


def test_blocks_are_taken_in_turn_and_waited_for_before_they_are_written_again(monkeypatch):
    """As on a GPU, where copies are late: a block's event is waited for when the block's turn comes again."""
    waited = []

    class Event:
        def __init__(self, number):
            self.number, self.recorded = number, 0

        def synchronize(self):
            waited.append((self.number, self.recorded))

        def record(self):
            self.recorded += 1

    staging = Staging(torch.zeros(1, dtype=torch.int64))
    monkeypatch.setattr(staging, "blocks", [torch.zeros(1, dtype=torch.int64) for _ in range(2)])
    monkeypatch.setattr(staging, "_copied", [Event(0), Event(1)])
    for _ in range(4):
        staging.take()
        staging.send()
    assert waited == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_fields_of_several_types_are_sent_by_one_copy():
    fields = StagedFields(
        {"seeds": (torch.int64, 3), "shares": (torch.float32, 3), "tables": (torch.int32, 3, 2)}, "cpu"
    )
    host = fields.take()
    host["seeds"][:2], host["shares"][1], host["tables"][2] = [2**62, 5], 0.5, [7, 8]
    assert not any(field.any() for field in fields.on_device.values()), "nothing was sent yet"
    fields.send()
    assert {name: field.tolist() for name, field in fields.on_device.items()} == {
        "seeds": [2**62, 5, 0], "shares": [0.0, 0.5, 0.0], "tables": [[0, 0], [0, 0], [7, 8]],
    }  # fmt: skip
    assert all(field.data_ptr() % 16 == 0 and field.is_contiguous() for field in fields.on_device.values())
