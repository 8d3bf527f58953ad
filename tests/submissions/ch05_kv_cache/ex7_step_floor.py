"""Wrong answers to exercise 5.7, and unusual right ones."""

from tests.submissions.edits import changed, rounded

MOVED = "moved = parameters * item_bytes + batch * length * token_bytes"
FLOPS = "flops = 2 * parameters * batch"
FLOOR = "return max(moved / bandwidth, flops / rate)"
BATCH = "return parameters * item_bytes // (length * token_bytes) + 1"


def moved(text):
    return changed("5.7", (MOVED, f"moved = {text}"))


def floor(text):
    return changed("5.7", (FLOOR, f"return {text}"))


def batch(text):
    return changed("5.7", (BATCH, f"return {text}"))


WRONG = {
    "rates_exchanged": floor("max(moved / rate, flops / bandwidth)"),
    "whole_seconds": floor("max(moved // bandwidth, flops // rate)"),
    "new_token_counted": moved("parameters * item_bytes + batch * (length + 1) * token_bytes"),
    "keys_and_values_counted_again": moved("parameters * item_bytes + 2 * batch * length * token_bytes"),
    "share_of_a_sequence": floor("max(moved / bandwidth, flops / rate) / batch"),
    "one_flop_a_weight__and_times_added": changed(
        "5.7",
        ('flops = 2 * parameters * batch', 'flops = parameters * batch'),
        ('return max(moved / bandwidth, flops / rate)', 'return moved / bandwidth + flops / rate'),
    ),
    "weights_for_each_sequence": moved("batch * (parameters * item_bytes + length * token_bytes)"),
    "cache_of_one_sequence": moved("parameters * item_bytes + length * token_bytes"),
    "weights_not_read": moved("batch * length * token_bytes"),
    "cache_not_read": moved("parameters * item_bytes"),
    "one_token_of_the_cache": moved("parameters * item_bytes + batch * token_bytes"),
    "weights_in_elements": moved("parameters + batch * length * token_bytes"),
    "weights_in_elements__overtaken": batch("parameters // (length * token_bytes) + 1"),
    "token_bytes_times_item_bytes": moved("item_bytes * (parameters + batch * length * token_bytes)"),
    "flops_of_one_sequence": changed("5.7", (FLOPS, "flops = 2 * parameters")),
    "one_flop_a_weight": changed("5.7", (FLOPS, "flops = parameters * batch")),
    "times_added": floor("moved / bandwidth + flops / rate"),
    "shorter_time_taken": floor("min(moved / bandwidth, flops / rate)"),
    "arithmetic_ignored": floor("moved / bandwidth"),
    "reading_ignored": floor("flops / rate"),
    "not_divided_by_the_rates": floor("max(moved, flops)"),
    "as_many_bytes_are_enough": batch("math.ceil(parameters * item_bytes / (length * token_bytes))"),
    "rounded_down": batch("parameters * item_bytes // (length * token_bytes)"),
    "part_of_a_sequence": batch("parameters * item_bytes / (length * token_bytes)"),
    "length_forgotten": batch("parameters * item_bytes // token_bytes + 1"),
}


UNUSUAL = {
    "as a roofline: FLOPs over what the intensity allows": """# Exercise 5.7 · The floor of a decode step
def step_floor(parameters, item_bytes, token_bytes, batch, length, bandwidth, rate):
    moved = sum(length * token_bytes for _ in range(batch)) + item_bytes * parameters
    flops = batch * parameters * 2.0
    intensity = flops / moved
    return flops / min(rate, intensity * bandwidth)

def cache_overtakes(parameters, item_bytes, token_bytes, length):
    return math.floor(item_bytes * parameters / (token_bytes * length)) + 1
""",
    "counted up, one sequence after the other": """# Exercise 5.7 · The floor of a decode step
def step_floor(parameters, item_bytes, token_bytes, batch, length, bandwidth, rate):
    reading = parameters * item_bytes / bandwidth
    computing = 0.0
    for _ in range(batch):
        reading += length * token_bytes / bandwidth
        computing += 2 * parameters / rate
    if computing > reading:
        return computing
    return reading

def cache_overtakes(parameters, item_bytes, token_bytes, length):
    weights, caches, batch = parameters * item_bytes, 0, 0
    while caches <= weights:
        batch += 1
        caches += length * token_bytes
    return batch
""",
    "tensors and divmod": """# Exercise 5.7 · The floor of a decode step
def step_floor(parameters, item_bytes, token_bytes, batch, length, bandwidth, rate):
    times = torch.tensor([(parameters * item_bytes + batch * length * token_bytes) / bandwidth,
                          2 * parameters * batch / rate], dtype=torch.float64)
    return times.amax().item()

def cache_overtakes(parameters, item_bytes, token_bytes, length):
    whole, _ = divmod(parameters * item_bytes, length * token_bytes)
    return whole + 1
""",
}


WRONG["result_rounded"] = rounded("5.7", "step_floor", 4)
