"""Wrong answers to exercise 15.1, and unusual right ones."""

from tests.submissions.edits import changed

LOCAL = 'if seen["local_requests"] > seen["global_requests"]:'
SPILLS = f'    {LOCAL}\n        return "spills", seen["local_requests"] / seen["global_requests"]\n'
MEMORY = 'if seen["memory_busy"] >= 60:'
WASTED = '("wasted bytes", wasted) if wasted >= 1.5 else ("memory", seen["memory_busy"])'
FEW = 'if seen["programs"] < seen["multiprocessors"]:'
ATOMIC = 'if seen["atomic_requests"] > seen["global_requests"]:'
TENSOR, SPECIAL = 'seen["tensor_busy"] >= 60', 'seen["special_busy"] >= 60'
LAST = '"too few warps" if seen["warps_active"] < 25 else "latency"'

WRONG = {
    "spills_unseen": changed("15.1", (SPILLS, "")),
    "spills_late": changed("15.1", (LOCAL, LOCAL.replace(":", ' and seen["memory_busy"] < 60:'))),
    "any_spill": changed("15.1", (LOCAL, 'if seen["local_requests"] > 0:')),
    "tensor_unseen": changed("15.1", ('seen["tensor_busy"] >= 60', 'seen["tensor_busy"] >= 600')),
    "special_unseen": changed("15.1", ('seen["special_busy"] >= 60', 'seen["special_busy"] >= 600')),
    "waste_unseen": changed("15.1", (WASTED, '("memory", seen["memory_busy"])')),
    "waste_of_an_idle_memory": changed(
        "15.1",
        (MEMORY, 'if seen["memory_busy"] >= 60 or seen["moved_bytes"] >= 1.5 * seen["least_bytes"]:'),
    ),
    "atomics_unseen": changed("15.1", (ATOMIC, "if False:")),
    "any_atomic": changed("15.1", (ATOMIC, 'if seen["atomic_requests"] > 0:')),
    "grid_unseen": changed("15.1", (FEW, "if False:")),
    "grid_of_equals": changed("15.1", (FEW, FEW.replace("<", "<="))),
    "warps_before_programs": changed("15.1", (FEW, FEW.replace(":", ' and seen["warps_active"] >= 25:'))),
    "warps_unseen": changed("15.1", (LAST, '"latency"')),
    "upside_down": changed("15.1", (
        'seen["local_requests"] / seen["global_requests"]', 'seen["global_requests"] / seen["local_requests"]')),
    "strictly": changed("15.1", (">= 60", "> 60")),
    "spills_late__behind_the_units": changed("15.1", (SPILLS, ""), (f"    {MEMORY}", f"{SPILLS}    {MEMORY}")),
    "memory_first": changed("15.1", (LOCAL, LOCAL.replace(":", ' and seen["memory_busy"] < 60:')),
                            ('seen["tensor_busy"] >= 60', 'seen["tensor_busy"] >= 60 > seen["memory_busy"]'),
                            ('seen["special_busy"] >= 60', 'seen["special_busy"] >= 60 > seen["memory_busy"]')),
    "figure_is_a_count": changed(
        "15.1", ('seen["local_requests"] / seen["global_requests"]', 'seen["local_requests"]')),
    "percent_as_a_share": changed("15.1", (">= 60", ">= 0.60")),
    "figure_in_percent": changed("15.1", ('seen["programs"] / seen["multi', '100 * seen["programs"] / seen["multi')),
    "figure_rounded": changed("15.1", ('("wasted bytes", wasted)', '("wasted bytes", round(wasted, 2))')),
    "figure_rounded__spills": changed("15.1", ('["local_requests"] / seen', '["local_requests"] // seen')),
    "figure_less_one": changed("15.1", ('("wasted bytes", wasted)', '("wasted bytes", wasted - 1)')),
    "latency_of_a_unit": changed("15.1", (
        f'return {LAST}, seen["warps_active"]',
        'few = seen["warps_active"] < 25\n'
        '    units = [seen[f"{unit}_busy"] for unit in ("memory", "tensor", "special")]\n'
        '    return ("too few warps", seen["warps_active"]) if few else ("latency", max(units))')),
    "memory_as_a_quotient": changed("15.1", ('("memory", seen["memory_busy"])', '("memory", wasted)')),
    "busiest": changed(
        "15.1",
        (TENSOR, f'{TENSOR} and seen["tensor_busy"] == max(seen[f"{{unit}}_busy"] for unit in UNITS)'),
        (SPECIAL, f'{SPECIAL} and seen["special_busy"] >= seen["memory_busy"]'),
        ("UNITS", '("memory", "tensor", "special")')),
    "out_of_order": changed("15.1", (TENSOR, f'{TENSOR} and seen["special_busy"] < 60')),
    "out_of_order__atomics_early": changed("15.1", (MEMORY, MEMORY.replace(
        ":", ' and seen["atomic_requests"] <= seen["global_requests"]:'))),
    "out_of_order__waste_above_special": changed("15.1", (SPECIAL, f"""{SPECIAL} and not (
            seen["memory_busy"] >= 60 and seen["moved_bytes"] >= 1.5 * seen["least_bytes"])""")),
    "rounded_first": changed("15.1", *((f'seen["{unit}_busy"] >= 60', f'round(seen["{unit}_busy"]) >= 60')
                                       for unit in ("memory", "tensor", "special"))),
    "rounded_first__warps": changed("15.1", ('seen["warps_active"] < 25', 'int(seen["warps_active"] + 0.5) < 25')),
    "waste_rounded": changed("15.1", ("wasted >= 1.5", "round(wasted, 1) >= 1.5")),
    "strictly__waste": changed("15.1", ("wasted >= 1.5", 'wasted >= 1.5 and seen["memory_busy"] > 60')),
    "waste_strictly": changed("15.1", ("wasted >= 1.5", "wasted > 1.5")),
    "atomics_of_equals": changed("15.1", (ATOMIC, 'if seen["atomic_requests"] >= seen["global_requests"] > 0:')),
    "atomics_against_all": changed("15.1", (ATOMIC, ATOMIC.replace(":", ' + seen["local_requests"]:'))),
    "programs_against_132": changed("15.1", (FEW, 'if seen["programs"] < 132:')),
    "last_round": changed("15.1", (FEW, FEW.replace("<", "%"))),
    "divided_too_early": changed("15.1", (LOCAL, 'waste = seen["moved_bytes"] / seen["least_bytes"]\n    ' + LOCAL)),
}

UNUSUAL = {
    "a table of rows": """# Exercise 15.1 · Find the bottleneck
def limit_of(seen):
    s = seen
    rows = [
        ("spills", s["local_requests"] > s["global_requests"], lambda: s["local_requests"] / s["global_requests"]),
        ("tensor pipe", s["tensor_busy"] >= 60, lambda: s["tensor_busy"]),
        ("special functions", s["special_busy"] >= 60, lambda: s["special_busy"]),
        ("wasted bytes", s["memory_busy"] >= 60 and s["moved_bytes"] >= 1.5 * s["least_bytes"],
         lambda: s["moved_bytes"] / s["least_bytes"]),
        ("memory", s["memory_busy"] >= 60, lambda: s["memory_busy"]),
        ("atomics", s["atomic_requests"] > s["global_requests"], lambda: s["atomic_requests"] / s["global_requests"]),
        ("too few programs", s["programs"] < s["multiprocessors"], lambda: s["programs"] / s["multiprocessors"]),
        ("too few warps", s["warps_active"] < 25, lambda: s["warps_active"]),
        ("latency", True, lambda: s["warps_active"]),
    ]
    return next((name, figure()) for name, fits, figure in rows if fits)
""",
    "a list for the pair": changed("15.1", (
        'return "too few warps" if seen["warps_active"] < 25 else "latency", seen["warps_active"]',
        'return ["too few warps" if seen["warps_active"] < 25 else "latency", seen["warps_active"]]')),
    "waste by a difference": changed("15.1", ("wasted >= 1.5", 'not seen["moved_bytes"] < 1.5 * seen["least_bytes"]')),
}
