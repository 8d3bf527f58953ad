"""Wrong answers to exercise 1.6, and unusual right ones."""

from tests.submissions.edits import rounded


def turning(steps="arithmetic_rate / bandwidth * item_bytes", compute="2 * steps * elements / arithmetic_rate",
            memory="2 * item_bytes * elements / bandwidth", seconds="max(compute, memory)",
            measured="seconds[0] / slope",
            slope="(seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])"):
    """The cell of 1.6 with one part replaced."""
    return f"""# Exercise 1.6 · Where the multiply-add chain turns
def turning_steps(arithmetic_rate, bandwidth, item_bytes):
    return {steps}

def chain_seconds(elements, steps, arithmetic_rate, bandwidth, item_bytes):
    compute = {compute}
    memory = {memory}
    return {seconds}

def measured_turning_steps(steps, seconds):
    slope = {slope}
    return {measured}
"""


WRONG = {
        "item_bytes_forgotten": turning(steps="arithmetic_rate / bandwidth"),
        "balance_inverted": turning(steps="bandwidth / arithmetic_rate * item_bytes"),
        "write_not_counted": turning(steps="arithmetic_rate / bandwidth * item_bytes / 2"),
        "multiply_add_counted_once": turning(steps="2 * arithmetic_rate / bandwidth * item_bytes"),
        "times_added": turning(seconds="compute + memory"),
        "seconds_without_write": turning(memory="item_bytes * elements / bandwidth"),
        "seconds_of_one_flop": turning(compute="steps * elements / arithmetic_rate"),
        "line_through_the_origin": turning(slope="seconds[-1] / steps[-1]"),
        "slope_over_all_points": turning(slope="(seconds[-1] - seconds[0]) / (steps[-1] - steps[0])"),
        "slope_over_all_points__2": turning(slope="float(np.polyfit(steps, seconds, 1)[0])"),
        "slope_inverted": turning(slope="(steps[-1] - steps[-2]) / (seconds[-1] - seconds[-2])"),
        "slope_inverted__2": turning(measured="slope / seconds[0]"),
        "line_met_the_floor": turning(measured="steps[-1] - (seconds[-1] - seconds[0]) / slope"),
        "first_slow_point": turning(
            measured="next(count for count, time in zip(steps, seconds) if time > 1.05 * seconds[0])"),
    }


UNUSUAL = {
        "by the intensity": turning(steps="arithmetic_rate * (2 * item_bytes) / (2 * bandwidth)"),
        "through the balance point": turning(
            seconds="compute if steps / item_bytes > arithmetic_rate / bandwidth else memory"),
        "a tensor of one element": turning(measured="torch.tensor(seconds[0] / slope, dtype=torch.float64)"),
        "a fit by numpy": turning(slope="float(np.polyfit(steps[-2:], seconds[-2:], 1)[0])"),
    }


WRONG["result_rounded"] = rounded("1.6", "measured_turning_steps", 1)
