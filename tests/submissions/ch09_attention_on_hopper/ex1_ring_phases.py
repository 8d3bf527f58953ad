"""Wrong answers to exercise 9.1, and unusual right ones."""

from tests.submissions.edits import changed

PHASE = "block // stages & 1"


BUFFER = f"buffer, phase = block % stages, {PHASE}"


ASK = '"wait", "free", buffer, phase ^ 1'


READY = '"wait", "ready", buffer, phase'


FREE = 'yield "arrive", "free", buffer'


WRONG = {
    "parity_of_the_block__and_freed_before_read": changed(
        "9.1",
        (
            '        yield "read", buffer\n        yield "arrive", "free", buffer\n',
            '        yield "arrive", "free", buffer\n        yield "read", buffer\n',
        ),
        ('block // stages & 1', 'block & 1'),
    ),
    "filled_before_asking": changed(
        "9.1",
        (
            '        yield "wait", "free", buffer, phase ^ 1\n        yield "load", buffer, block\n',
            '        yield "load", buffer, block\n        yield "wait", "free", buffer, phase ^ 1\n',
        ),
    ),
    "producer_waits_for_its_own_phase": changed("9.1", (ASK, '"wait", "free", buffer, phase')),
    "own_phase_after_the_first_use": changed(
        "9.1",
        (f"        yield {ASK}\n", '        if block >= stages:\n            yield "wait", "free", buffer, phase\n'),
    ),
    "consumer_waits_for_the_phase_before": changed("9.1", (READY, '"wait", "ready", buffer, phase ^ 1')),
    "producer_waits_for_its_own_phase__and_consumer_for_the_phase_before": changed(
        "9.1", (READY, '"wait", "ready", buffer, 1 - phase'), (ASK, '"wait", "free", buffer, phase')
    ),
    "parity_of_the_block": changed("9.1", (PHASE, "block & 1")),
    "parity_of_the_block__only_the_producer": changed("9.1", (ASK, '"wait", "free", buffer, (block + 1) % 2')),
    "parity_of_the_block__only_the_consumer": changed("9.1", (READY, '"wait", "ready", buffer, block % 2')),
    "parity_of_the_buffer": changed("9.1", (PHASE, "block % stages & 1")),
    "parity_never_changes": changed("9.1", (PHASE, "0")),
    "parity_never_changes__only_the_producer": changed("9.1", (ASK, '"wait", "free", buffer, 1')),
    "parity_never_changes__only_the_consumer": changed("9.1", (READY, '"wait", "ready", buffer, 0')),
    "filled_without_asking": changed("9.1", (f"        yield {ASK}\n", "")),
    "read_without_asking": changed("9.1", (f"        yield {READY}\n", "")),
    "never_freed": changed("9.1", (f"        {FREE}\n", "")),
    "never_freed__before_the_last_read": changed(
        "9.1",
        (f"        {FREE}\n", '    for block in range(blocks):\n        yield "arrive", "free", block % stages\n'),
    ),
    "freed_before_read": changed(
        "9.1", (f"        {FREE}\n", ""), ('yield "read", buffer', f'{FREE}\n        yield "read", buffer')
    ),
    "one_buffer_only": changed("9.1", ("block % stages, block // stages & 1", "0, block & 1")),
    "waits_for_its_own_copy": changed(
        "9.1", ('"load", buffer, block', '"load", buffer, block\n        yield "wait", "ready", buffer, phase')
    ),
    "last_block_missing": changed(
        "9.1",
        (f"(blocks):\n        {BUFFER}\n        yield {ASK}", f"(blocks - 1):\n        {BUFFER}\n        yield {ASK}"),
    ),
    "parity_of_the_block__and_never_changes": changed(
        "9.1", (ASK, '"wait", "free", buffer, 1'), (READY, '"wait", "ready", buffer, block & 1')
    ),
    "consumers_wait_for_ever": changed("9.1", (READY, '"wait", "ready", buffer, block // (stages + 1) & 1')),
}


COUNTERS_FLIPPED = """# Exercise 9.1 · The phases of a ring
def producer(blocks, stages):
    steps, buffer, parity = [], 0, 1
    for block in range(blocks):
        steps += [("wait", "free", buffer, parity), ("load", buffer, block)]
        buffer += 1
        if buffer == stages:
            buffer, parity = 0, 1 - parity
    return steps

def consumer(blocks, stages):
    steps, buffer, parity = [], 0, 0
    for block in range(blocks):
        steps += [("wait", "ready", buffer, parity), ("read", buffer), ("arrive", "free", buffer)]
        buffer += 1
        if buffer == stages:
            buffer, parity = 0, 1 - parity
    return steps
"""


FIRST_USES_UNASKED = """# Exercise 9.1 · The phases of a ring
def producer(blocks, stages):
    for block in range(blocks):
        use = block // stages
        if use > 0:
            yield ["wait", "free", block % stages, (use - 1) % 2]
        yield ["load", block % stages, block]

def consumer(blocks, stages):
    block = 0
    while block < blocks:
        yield ["wait", "ready", block % stages, block // stages % 2]
        yield ["read", block % stages]
        yield ["arrive", "free", block % stages]
        block += 1
"""


UNUSUAL = {
        "a parity that flips, and lists": COUNTERS_FLIPPED,
        "first uses without a wait": FIRST_USES_UNASKED,
        "freed at the next turn": changed(
            "9.1",
            ('yield "read", buffer', 'yield "read", buffer\n        pass'),
            ("phase ^ 1", "1 - phase"),
        ),
    }
