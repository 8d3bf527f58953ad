"""A GPU and its host as two clocks, with what makes the timing of a short kernel hard: exercise 14.5 plays on it.

A launch costs the host time, and the GPU runs what it was sent, in order. On request the first launch compiles, the
clock rate rises, an L2 cache keeps all copies of the input but one, and another process interrupts now and then. An
event says the time to half a microsecond, as `cudaEventElapsedTime` does by the CUDA Runtime API.
"""

from __future__ import annotations


def on_a_simulated_gpu(functions, machine):
    """What `functions["time_kernel"](device)` finds on a device with these traps.

    machine: {"kernel": µs of a run with cold caches and the highest clock rate, "launch": µs of the host's for each
        launch, "copies": of the kernel's input, "compile": µs of the first launch, "warm": share of the time where the
        copy is in the cache, "slower": how much longer a kernel takes at first, "rises": µs of work until the clock is
        up, "between": µs of work from one interruption to the next, 0 for none, "seed": of the chance in all this}.

    The device has `copies`, launch(copy), capture(copies) -> replay, event(), synchronize() and now(), in µs.
    """
    # One function without helpers outside, since the checker sends its source alone to another process. `host` and
    # `free` say when the host and the GPU have done what they have to.
    import random

    chance = random.Random(machine["seed"])
    clocks = {"host": 0.0, "free": 0.0, "worked": 0.0, "compile": machine["compile"], "seen": 0.0}
    clocks["interrupted"] = machine["between"] * chance.uniform(0.2, 1.2) if machine["between"] else float("inf")
    copies, held = machine["copies"], []

    def sent(chosen):
        if any(type(copy) is not int or not 0 <= copy < copies for copy in chosen):
            raise ValueError(f"Copies have the numbers 0 to {copies - 1}; {chosen} were asked for.")
        clocks["host"] += clocks["compile"] + machine["launch"] * len(chosen)
        clocks["compile"] = 0.0

    def run(copy):
        slow = 1 + machine["slower"] * max(0.0, 1 - clocks["worked"] / machine["rises"])
        took = machine["kernel"] * slow * chance.uniform(0.995, 1.005) * (machine["warm"] if copy in held else 1.0)
        if copy in held:
            held.remove(copy)
        held.append(copy)
        del held[: -copies + 1]
        clocks["worked"] += took
        if clocks["worked"] > clocks["interrupted"]:
            took += chance.uniform(100, 200)
            clocks["interrupted"] += machine["between"] * chance.uniform(0.7, 1.3)
        clocks["free"] += took

    class Event:
        def __init__(self, time):
            self._time = time

        def elapsed_time(self, end):
            """From this event to another one, in µs."""
            if max(self._time, end._time) > clocks["seen"]:
                raise RuntimeError("An event has not happened yet as far as the host knows: synchronize first.")
            return float(int(2 * end._time) - int(2 * self._time)) / 2

    class Device:
        def __init__(self):
            self.copies = copies

        def launch(self, copy=0):
            sent([copy])
            clocks["free"] = max(clocks["free"], clocks["host"])
            run(copy)

        def capture(self, chosen):
            chosen = list(chosen)
            sent(chosen)

            def replay():
                clocks["host"] += 10.0
                clocks["free"] = max(clocks["free"], clocks["host"])
                for copy in chosen:
                    run(copy)

            return replay

        def event(self):
            clocks["host"] += 1.0
            happens = max(clocks["free"], clocks["host"])
            clocks["free"] = happens + 1.0
            return Event(happens)

        def synchronize(self):
            clocks["host"] = max(clocks["host"], clocks["free"]) + 10.0
            clocks["seen"] = clocks["host"]

        def now(self):
            clocks["host"] += 0.1
            return clocks["host"]

    return functions["time_kernel"](Device())
