"""Wrong answers to exercise 1.2, and unusual right ones."""

from tests.submissions.edits import edited, rounded


def bounds(balance="teraflops * 1e12 / (gigabytes_per_second * 1e9)",
           side="'compute' if compute >= memory else 'memory'", seconds="max(compute, memory)"):
    """The cell of 1.2 with one part replaced."""
    return f"""# Exercise 1.2 · Balance point, bound and least time
def balance_point(teraflops, gigabytes_per_second):
    return {balance}

def least_time(flops, bytes_moved, teraflops, gigabytes_per_second):
    compute = flops / (teraflops * 1e12)
    memory = bytes_moved / (gigabytes_per_second * 1e9)
    return {side}, {seconds}
"""


WRONG = {
        "one_bound_for_all": bounds(side="'memory'"),
        "one_bound_for_all__and_its_time": bounds(side="'memory'", seconds="memory"),
        "one_bound_for_all__compute": bounds(side="'compute'", seconds="compute"),
        "times_added": bounds(seconds="compute + memory"),
        "smaller_time": bounds(seconds="min(compute, memory)"),
        "comparison_reversed": bounds(side="'memory' if compute >= memory else 'compute'",
                                      seconds="min(compute, memory)"),
        "seconds_before_side": bounds(side="max(compute, memory)",
                                      seconds="'compute' if compute >= memory else 'memory'"),
        "sides_swapped": bounds(side="'memory' if compute >= memory else 'compute'"),
        "intensity_against_one": bounds(side="'compute' if flops >= bytes_moved else 'memory'"),
        "always_the_arithmetic": bounds(seconds="compute"),
        "balance_inverted": bounds(balance="gigabytes_per_second * 1e9 / (teraflops * 1e12)"),
        "unit_slip": bounds(balance="teraflops / gigabytes_per_second"),
        "unit_slip__2": bounds(seconds="max(compute, memory) * 1e6"),
    }


UNUSUAL = {
        "by the intensity": bounds(
            side="'compute' if flops / bytes_moved >= balance_point(teraflops, gigabytes_per_second) else 'memory'"),
        "other units on the way": bounds(balance="1000 * teraflops / gigabytes_per_second"),
        "a list": edited(bounds(), ("return 'compute' if compute >= memory else 'memory', max(compute, memory)",
                                     "return ['compute' if compute >= memory else 'memory', max(compute, memory)]")),
        "through numpy": bounds(seconds="float(np.maximum(compute, memory))"),
    }


WRONG["result_rounded"] = rounded("1.2", "balance_point", 1)
WRONG["result_rounded__seconds"] = rounded("1.2", "least_time", 6)
