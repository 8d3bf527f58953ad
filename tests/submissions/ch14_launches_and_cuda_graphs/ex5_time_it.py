"""Wrong answers to exercise 14.5, and unusual right ones."""

from tests.submissions.edits import changed

HEAD = "# Exercise 14.5 · Time a kernel of a few microseconds\ndef time_kernel(device):\n"
WARM = """
    replay = device.capture([number % device.copies for number in range(20)])
    for _ in range(200):
        replay()
    device.synchronize()
"""
CAPTURED = "device.capture([number % device.copies for number in range(kernels)])"
MEDIAN = "spans[len(spans) // 2]"
WARMED = "range(200)"

WRONG = {
    "not_waited_for": HEAD + """
    device.launch(0)
    device.synchronize()
    start = device.now()
    for number in range(2000):
        device.launch(number % device.copies)
    return (device.now() - start) / 2000
""",
    # Numba's and Triton's forums, again and again: one call, one clock, no synchronize.
    "not_waited_for__one_call": HEAD + WARM + """
    start = device.now()
    device.launch(0)
    return device.now() - start
""",
    "too_short": HEAD + WARM + """
    start = device.now()
    for _ in range(50):
        replay()
    return (device.now() - start) / 1000
""",
    "synchronised_each_time": HEAD + WARM + """
    times = []
    for number in range(300):
        start = device.now()
        device.launch(number % device.copies)
        device.synchronize()
        times.append(device.now() - start)
    return sorted(times)[150]
""",
    "gap_counted": HEAD + WARM + """
    times = []
    for number in range(300):
        start = device.event()
        device.launch(number % device.copies)
        end = device.event()
        device.synchronize()
        times.append(start.elapsed_time(end) - 1.0)
    return sorted(times)[150]
""",
    "launch_bound": HEAD + WARM + """
    times = []
    for _ in range(40):
        start = device.event()
        for number in range(20):
            device.launch(number % device.copies)
        end = device.event()
        device.synchronize()
        times.append((start.elapsed_time(end) - 1.0) / 20)
    return sorted(times)[20]
""",
    "not_divided": changed("14.5", (f"{MEDIAN} / kernels", MEDIAN)),
    "other_unit": changed("14.5", (f"{MEDIAN} / kernels", f"{MEDIAN} / kernels * 1e-3")),
    "event_counted": HEAD + WARM + """
    for _ in range(20):
        replay()
    events = [device.event()]
    for number in range(100):
        device.capture([number % device.copies])()
        events.append(device.event())
    device.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))[50]
""",
    # Twenty kernels, and the 10 µs in which the GPU waits for the replay.
    "event_counted__and_the_wait_for_a_replay": HEAD + WARM + """
    times = []
    for _ in range(61):
        start = device.event()
        replay()
        end = device.event()
        device.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[30] / 20
""",
    "too_short__divided_by_all": changed("14.5", (f"{MEDIAN} / kernels", f"{MEDIAN} / (kernels + len(events))")),
    "too_long": changed("14.5", (f"{MEDIAN} / kernels", f"{MEDIAN} / (kernels - 3)")),
    # The span includes the wait for the first launch of every replay.
    "too_long__synchronised": HEAD + WARM + """
    times = []
    for _ in range(61):
        start = device.now()
        replay()
        device.synchronize()
        times.append((device.now() - start) / 20)
    return sorted(times)[30]
""",
    "compiling_counted": HEAD + """
    start = device.now()
    replay = device.capture([number % device.copies for number in range(20)])
    for _ in range(300):
        replay()
    device.synchronize()
    return (device.now() - start) / 6000
""",
    "clock_still_rising": changed("14.5", (WARMED, "range(3)")),
    "input_in_l2": changed("14.5", (CAPTURED, "device.capture([0] * kernels)")),
    "input_in_l2__each_copy_twice": changed(
        "14.5", (CAPTURED, "device.capture([number // 2 % device.copies for number in range(kernels)])")
    ),
    "interruptions_counted": changed("14.5", (MEDIAN, "sum(spans) / len(spans)")),
    "interruptions_counted__one_span": changed("14.5", ("kernels = 20", "kernels = 2000")),
    "clock_still_rising__and_the_mean": changed("14.5", (WARMED, "range(3)"), (MEDIAN, "sum(spans) / len(spans)")),
    "gap_counted__and_warm": HEAD + """
    device.launch(0)
    times = []
    for number in range(5000):
        start = device.event()
        device.launch(0)
        end = device.event()
        device.synchronize()
        times.append(start.elapsed_time(end) - 1.0)
    return sorted(times)[2500]
""",
}

UNUSUAL = {
    "launches behind a long replay": HEAD + WARM + """
    times = []
    for _ in range(40):
        for _ in range(10):
            replay()
        start = device.event()
        for number in range(20):
            device.launch(number % device.copies)
        end = device.event()
        device.synchronize()
        times.append((start.elapsed_time(end) - 1.0) / 20)
    return sorted(times)[20]
""",
    "the fastest span": changed("14.5", (MEDIAN, "spans[0]")),
    "the host's clock, twice as much less once": HEAD + WARM + """
    def span(times):
        found = []
        for _ in range(50):
            device.synchronize()
            start = device.now()
            for _ in range(times):
                replay()
            device.synchronize()
            found.append(device.now() - start)
        return min(found)
    return (span(3) - span(1)) / 40
""",
    "events left in": changed("14.5", (" - 1.0 for", " for"), ("kernels = 20", "kernels = 40")),
    "warm until two spans agree": changed(
        "14.5",
        ("    for _ in range(200):  # 4,000 kernels of at least 3 µs: more than 10 ms of work\n        replay()\n",
         "    begin = device.now()\n    while device.now() - begin < 20_000:\n        replay()\n"
         "        device.synchronize()\n"),
    ),
    "statistics.median": changed(
        "14.5", (f"return {MEDIAN}", "import statistics\n    return statistics.median(spans)")
    ),
}
