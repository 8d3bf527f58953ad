"""Wrong answers to exercise 15.3, and unusual right ones."""

from tests.submissions.edits import changed

MEDIAN = "statistics.median(b / a for a, b in zip(first, second))"
PICKED = "[ratios[(start + step) % len(ratios)] for start in row for step in range(block)]"
RESAMPLE = f"ratio_of(ones, {PICKED})"
ENDS = "return found[outer], found[-1 - outer]"
SHARE = "(len(as_far) + 1) / (len(signs) + 1)"
FAR = "abs(sum(sign * log for sign, log in zip(row, logs))) >= observed"
SET = "[ratios[place] for place in {(start + step) % len(ratios) for start in row for step in range(block)}]"
LOGS = "math.log(b / a)"

WRONG = {
    "mean_taken": changed("15.3", (MEDIAN, "statistics.mean([b / a for a, b in zip(first, second)])")),
    "upper_middle": changed("15.3", (MEDIAN, MEDIAN.replace("median(", "median_high("))),
    "upper_middle__lower": changed("15.3", (MEDIAN, MEDIAN.replace("median(", "median_low("))),
    "medians_divided": changed("15.3", (MEDIAN, "statistics.median(second) / statistics.median(first)")),
    "best_divided": changed("15.3", (MEDIAN, "min(second) / min(first)"), (RESAMPLE, f"statistics.median({PICKED})"),
                            ("    ones =", "    import statistics\n    ones =")),
    "sums_divided": changed("15.3", (MEDIAN, "sum(second) / sum(first)"), (RESAMPLE, f"statistics.median({PICKED})"),
                            ("    ones =", "    import statistics\n    ones =")),
    "upside_down": changed("15.3", ("ratios = [b / a", "ratios = [a / b")),
    "difference": changed("15.3", (MEDIAN, "statistics.median(b - a for a, b in zip(first, second))"),
                          (RESAMPLE, f"statistics.median({PICKED})"),
                          ("    ones =", "    import statistics\n    ones =")),
    "blocks_ignored": changed("15.3", ("for step in range(block)]", "for step in (0,)]")),
    "block_cut": changed("15.3", (
        "for step in range(block)]", "for step in range(block) if start + step < len(ratios)]")),
    "block_held": changed("15.3", ("(start + step) % len(ratios)", "min(start + step, len(ratios) - 1)")),
    "ninety_per_cent": changed("15.3", ("// 40", "// 20")),
    "all_of_them": changed("15.3", (ENDS, "return found[0], found[-1]")),
    "upper_end": changed("15.3", (ENDS, "return found[outer], found[-2 - outer]")),
    "ends_exchanged": changed("15.3", (ENDS, "return found[-1 - outer], found[outer]")),
    "not_sorted": changed("15.3", ("found = sorted(", "found = list(")),
    "never_zero": changed("15.3", (SHARE, "len(as_far) / len(signs)")),
    "one_side": changed("15.3", (FAR, FAR.replace("abs(sum", "(sum"))),
    "ratios_flipped": changed("15.3", (LOGS, "b / a")),
    "less_one": changed("15.3", (LOGS, "b / a - 1")),
    "differences_flipped": changed("15.3", (LOGS, "b - a")),
    "nearer_counted": changed("15.3", (">= observed", "< observed")),
    "geometric_mean": changed("15.3", (MEDIAN, "statistics.geometric_mean([b / a for a, b in zip(first, second)])"),
                              (RESAMPLE, f"statistics.median({PICKED})"),
                              ("    ones =", "    import statistics\n    ones =")),
    "medians_divided__in_the_interval": changed("15.3", (RESAMPLE, " / ".join(
        f"statistics.median({PICKED})".replace("ratios[(", f"{which}[(") for which in ("second", "first"))),
        ("    ones =", "    import statistics\n    ones =")),
    "resample_cut": changed("15.3", (RESAMPLE, f"statistics.median({PICKED}[: len(ratios)])"),
                            ("    ones =", "    import statistics\n    ones =")),
    "strictly": changed("15.3", (FAR, FAR.replace(">=", ">"))),
    "middle_of_logarithms": changed("15.3", (
        MEDIAN, "math.exp(statistics.median(math.log(b / a) for a, b in zip(first, second)))")),
    "middle_of_logarithms__inverses": changed("15.3", (
        MEDIAN, "1 / statistics.median(a / b for a, b in zip(first, second))")),
    "upside_down__at_the_end": changed("15.3", (ENDS, "return 1 / found[-1 - outer], 1 / found[outer]")),
    "upside_down__and_signs_as_0_and_1": changed("15.3", (ENDS, "return 1 / found[-1 - outer], 1 / found[outer]"),
                                                 (FAR, FAR.replace("sign * log", "(sign > 0) * log"))),
    "each_once": changed("15.3", (RESAMPLE, f"statistics.median({SET})"),
                         ("    ones =", "    import statistics\n    ones =")),
    "starts_of_blocks": changed("15.3", ("(start + step)", "(start * block + step)")),
    "backwards": changed("15.3", ("(start + step)", "(start - step)")),
    "drop_rounded": changed("15.3", ("len(found) // 40", "min(len(found) - 1, math.ceil(len(found) / 40))")),
    "drop_rounded__nearest": changed("15.3", ("len(found) // 40", "round(len(found) / 40)")),
    "one_at_least": changed("15.3", ("len(found) // 40", "max(1, len(found) // 40) if len(found) > 2 else 0")),
    "upper_too_high": changed("15.3", (ENDS, "return found[outer], found[-max(outer, 1)]")),
    "upper_too_high__by_share": changed("15.3", (
        ENDS, "return found[outer], found[min(len(found) - 1, int(0.975 * len(found)))]")),
    "quantile": changed("15.3", (ENDS, "return tuple(np.quantile(found, [0.025, 0.975]).tolist())")),
    "not_below": changed("15.3", (SHARE, "(len(as_far) + 1) / len(signs)")),
    "never_zero__at_least_one": changed("15.3", (SHARE, "max(len(as_far), 1) / len(signs)")),
    "signs_as_0_and_1": changed("15.3", (FAR, FAR.replace("sign * log", "(sign > 0) * log"))),
    "median_of_logs": changed("15.3", ("abs(sum(logs))", "abs(ratio_of([1.0] * len(logs), logs))"), (
        FAR, "abs(ratio_of([1.0] * len(logs), [sign * log for sign, log in zip(row, logs)])) >= observed")),
    "dropped_at_one_end": changed("15.3", (ENDS, "return found[outer], found[-1]")),
    "dropped_at_one_end__the_top": changed("15.3", (ENDS, "return found[0], found[-1 - outer]")),
    "minus_zero": changed("15.3", (ENDS, "found = found[outer:-outer]\n    return found[0], found[-1]")),
    "minus_zero__by_min": changed("15.3", (ENDS, "found = found[outer:-outer]\n    return min(found), max(found)")),
    "rows_once": changed("15.3", ("for row in signs", "for row in {tuple(row) for row in signs}")),
}

UNUSUAL = {
    "the slice ends at a length": changed("15.3", (ENDS, "found = found[outer : len(found) - outer]\n"
                                                   "    return found[0], found[-1]")),
    "the list twice, because a block goes round once at most": changed("15.3", (
        PICKED, "[ratio for start in row for ratio in (ratios + ratios)[start : start + block]]")),
    "by numpy": """# Exercise 15.3 · Two per cent
def ratio_of(first, second):
    return float(np.median(np.divide(second, first)))

def interval(first, second, starts, block):
    ratios = np.divide(second, first)
    places = (np.array(starts)[:, :, None] + np.arange(block)) % len(ratios)
    found = np.sort(np.median(ratios[places].reshape(len(starts), -1), axis=1))
    outer = len(found) // 40
    return float(found[outer]), float(found[len(found) - outer - 1])

def chance_of(first, second, signs):
    logs = np.log(second) - np.log(first)
    sums = np.abs(np.array(signs) @ logs)
    return (int((sums >= abs(logs.sum())).sum()) + 1) / (len(signs) + 1)
""",
    "logarithms to base 2": changed("15.3", (LOGS, "math.log2(b) - math.log2(a)")),
    "by torch": changed("15.3", (
        f"    import statistics\n\n    return {MEDIAN}",
        "    a, b = (torch.tensor(times, dtype=torch.float64) for times in (first, second))\n"
        "    ratios = (b / a).sort().values\n"
        "    return float(ratios[(len(ratios) - 1) // 2] + ratios[len(ratios) // 2]) / 2")),
}
