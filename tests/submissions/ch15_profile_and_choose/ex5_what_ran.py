"""Wrong answers to exercise 15.5, and unusual right ones."""

from tests.submissions.edits import changed, edited

TIME = "sum(microseconds.get(number, 0) for number in launches)"
LAYERS = 'sorted((e for e in events if e["cat"] == "user_annotation"), key=lambda e: e["ts"])'
LAUNCHES = 'e["cat"] in ("cuda_runtime", "cuda_driver")'
INSIDE = 'layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]'
PAIRS = '[(name, time / others[len(others) // 2]) for name, backend, time in rows if backend == "math"]'
MEDIAN = "others[len(others) // 2]"

PLACES = """# Exercise 15.5 · What ran, and which layer fell back
def what_ran(events):
    layers = sorted([e for e in events if e["cat"] == "user_annotation"], key=lambda e: e["ts"])

    def layer_of(ts):
        return next((n for n, e in enumerate(layers) if e["ts"] <= ts <= e["ts"] + e["dur"]), None)

    owner = {e["args"]["correlation"]: layer_of(e["ts"]) for e in events if e["cat"] in {"cuda_runtime", "cuda_driver"}}
    times, names = [0.0] * len(layers), ["unknown"] * len(layers)
    for e in events:
        if e["cat"] == "kernel":
            at = owner.get(e["args"]["correlation"])
            if at is not None:
                times[at] += e["dur"]
        if e["cat"] == "cpu_op" and "::_scaled_dot_product" in e["name"]:
            place = layer_of(e["ts"])
            if place is not None:
                names[place] = next(b for b in ("cudnn", "flash", "efficient", "math") if b in e["name"])
    return [(e["name"], name, time) for e, name, time in zip(layers, names, times)]

def fell_back(rows):
    fast = sorted(t for _, b, t in rows if not b == "math")
    return [(n, t / fast[len(fast) // 2]) for n, b, t in rows if b == "math"] if fast else []
"""
OF_A_KERNEL, OF_A_BACKEND = ("if at is not None:", "if at:"), ("if place is not None:", "if place:")

WRONG = {
    "kernels_by_time": changed("15.5", (TIME, 'sum(e["dur"] for e in inside if e["cat"] == "kernel")')),
    "all_kernels": changed("15.5", (TIME, "sum(microseconds.values())")),
    "one_kernel": changed("15.5", (TIME, TIME.replace("sum(", "max((").replace("launches)", "launches), default=0)"))),
    "one_kernel__first": changed("15.5", ("in launches)", "in launches[:1])")),
    "one_kernel__last_of_a_launch": changed("15.5", (
        'microseconds[number] = microseconds.get(number, 0) + event["dur"]', 'microseconds[number] = event["dur"]')),
    "time_on_the_cpu": changed("15.5", (TIME, 'layer["dur"]')),
    "time_of_launches": changed("15.5", (TIME, f"sum(e['dur'] for e in inside if {LAUNCHES})")),
    "driver_left_out": changed("15.5", (LAUNCHES, 'e["cat"] == "cuda_runtime"')),
    "order_of_the_file": changed("15.5", (LAYERS, '[e for e in events if e["cat"] == "user_annotation"]')),
    "whole_name": changed("15.5", ('rest.removeprefix("attention_").removesuffix("_attention")', 'event["name"]')),
    "backend_of_another": changed("15.5", ("for event in inside:", "for event in events:")),
    "unknown_as_math": changed("15.5", ('backend = "unknown"', 'backend = "math"')),
    "mean": changed("15.5", (f"time / {MEDIAN}", "time / (sum(others) / len(others))")),
    "median_of_all": changed("15.5", (
        'sorted(row[2] for row in rows if row[1] != "math")', "sorted(row[2] for row in rows)"),
                             ("if not others:", 'if all(row[1] == "math" for row in rows):')),
    "fastest": changed("15.5", (MEDIAN, "others[0]")),
    "upside_down": changed("15.5", (f"time / {MEDIAN}", f"{MEDIAN} / time")),
    "no_ratio": changed("15.5", (f"time / {MEDIAN}", "time")),
    "launches_added": changed("15.5", (
        f"{TIME}))", f'{TIME}\n                     + sum(e["dur"] for e in inside if {LAUNCHES})))')),
    "outside_counted": changed("15.5", ("        launches = [", '''
        windows = [e for e in events if e["cat"] == "user_annotation"]
        if not rows:
            inside = inside + [e for e in events if not any(w["ts"] <= e["ts"] <= w["ts"] + w["dur"] for w in windows)]
        launches = [''')),
    "launch_behind_its_kernel": """# Exercise 15.5 · What ran, and which layer fell back
def what_ran(events):
    rows = [[e["name"], "unknown", 0, e] for e in events if e["cat"] == "user_annotation"]
    rows.sort(key=lambda row: row[3]["ts"])
    owner = {}
    for e in events:
        for row in rows:
            if row[3]["ts"] <= e["ts"] <= row[3]["ts"] + row[3]["dur"]:
                if e["cat"] == "cpu_op" and e["name"].startswith("aten::_scaled_dot_product_"):
                    row[1] = next(b for b in ("cudnn", "flash", "efficient", "math") if b in e["name"])
                if e["cat"] in ("cuda_runtime", "cuda_driver"):
                    owner[e["args"]["correlation"]] = row
        if e["cat"] == "kernel" and e["args"]["correlation"] in owner:
            owner[e["args"]["correlation"]][2] += e["dur"]
    return [tuple(row[:3]) for row in rows]

def fell_back(rows):
    fast = sorted(t for _, b, t in rows if b != "math")
    return [(n, t / fast[len(fast) // 2]) for n, b, t in rows if b == "math"] if fast else []
""",
    "windows_merged": changed("15.5", (
        "    return rows\n", "    return list({row[0]: row for row in rows}.values())\n")),
    "one_kernel__last_to_run": changed("15.5", (
        TIME, "([microseconds[n] for n in launches if n in microseconds] or [0])[-1]")),
    "unknown_left_out": changed("15.5", ('if row[1] != "math")', 'if row[1] not in ("math", "unknown"))')),
    "end_left_out": changed("15.5", (INSIDE, INSIDE.replace('<= layer["ts"] +', '< layer["ts"] +'))),
    "begin_left_out": changed("15.5", (INSIDE, INSIDE.replace("<= e", "< e"))),
    "launch_has_to_end": changed("15.5", (
        LAUNCHES, f'{LAUNCHES} and e["ts"] + e["dur"] <= layer["ts"] + layer["dur"]')),
    "launch_by_name": changed("15.5", (LAUNCHES, f'{LAUNCHES} and "LaunchKernel" in e["name"]')),
    "outside_counted__until_the_next": changed("15.5", (INSIDE, """layer["ts"] <= e["ts"] < min(
            (w["ts"] for w in events if w["ts"] > layer["ts"] and w["cat"] == "user_annotation"),
            default=math.inf)""")),
    "outside_counted__before_the_first": changed("15.5", (
        INSIDE, f'{INSIDE} or e["ts"] < layer["ts"] == min(w["ts"] for w in events if w["cat"] == "user_annotation")')),
    "without_launch": changed("15.5", (f"        rows.append((layer[\"name\"], backend, {TIME}))", f"""
        begun = {{e["args"]["correlation"] for e in events if {LAUNCHES}}}
        alone = [e for e in inside if e["cat"] == "kernel" and e["args"]["correlation"] not in begun]
        rows.append((layer["name"], backend, {TIME} + sum(e["dur"] for e in alone)))""")),
    "place_of_0": edited(PLACES, OF_A_KERNEL, OF_A_BACKEND),
    "place_of_0__kernels": edited(PLACES, OF_A_KERNEL),
    "place_of_0__backend": edited(PLACES, OF_A_BACKEND),
    "number_of_0": changed("15.5", ("for number in launches)", "for number in launches if number)")),
    "whole_microseconds": changed("15.5", (TIME, f"int({TIME})")),
    "no_row": changed("15.5", ("        rows.append", "        if launches:\n            rows.append")),
    "windows_by_name": changed("15.5", (
        'e["cat"] == "user_annotation")', 'e["cat"] == "user_annotation" and "attention" in e["name"])')),
    "order_of_names": changed("15.5", ('key=lambda e: e["ts"]', 'key=lambda e: (e["name"], e["ts"])')),
    "windows_merged__added": changed("15.5", (
        "    return rows\n", "    merged = {}\n    for name, backend, time in rows:\n"
        "        merged[name] = (name, backend, merged.get(name, (0, 0, 0))[2] + time)\n"
        "    return list(merged.values())\n")),
    "other_operation": changed("15.5", (
        'event["name"].startswith("aten::_scaled_dot_product_")', 'any(word in event["name"] for word in WORDS)'),
        ('rest.removeprefix("attention_").removesuffix("_attention")', 'next(word for word in WORDS if word in rest)'),
        ("WORDS", '("cudnn", "flash", "efficient", "math")')),
    "any_category": changed("15.5", ('event["cat"] == "cpu_op" and event["name"]', 'event["name"]')),
    "cut_wrongly": changed("15.5", ('rest.removeprefix("attention_").removesuffix("_attention")', "rest")),
    "cut_wrongly__first_word": changed("15.5", (
        'rest.removeprefix("attention_").removesuffix("_attention")', 'rest.split("_")[0]')),
    "one_kernel__first_of_a_launch": changed("15.5", (
        'microseconds[number] = microseconds.get(number, 0) + event["dur"]',
        'microseconds.setdefault(number, event["dur"])')),
    "not_sorted": changed("15.5", ("others = sorted(row[2]", "others = list(row[2]")),
    "other_middle": changed("15.5", (MEDIAN, f"(({MEDIAN} + others[(len(others) - 1) // 2]) / 2)")),
    "names_merged": changed("15.5", (PAIRS, f"list(dict({PAIRS}).items())")),
    "only_slower": changed("15.5", (PAIRS, PAIRS.replace('== "math"', f'== "math" and time > {MEDIAN}'))),
    "by_time": changed("15.5", (PAIRS, f"sorted({PAIRS}, key=lambda pair: -pair[1])")),
    "less_one": changed("15.5", (f"time / {MEDIAN}", f"time / {MEDIAN} - 1")),
    "all_math": changed("15.5", ("return []", "return [(row[0], 1.0) for row in rows]")),
    "nothing_to_compare": changed("15.5", ("    if not others:\n        return []\n", "")),
}

UNUSUAL = {
    "from the kernels to the layers": PLACES,
    "lists for tuples": changed("15.5", (f'rows.append((layer["name"], backend, {TIME}))',
                                         f'rows.append([layer["name"], backend, {TIME}])')),
    "by regular expressions": changed("15.5", (
        'rest = event["name"].removeprefix("aten::_scaled_dot_product_")\n'
        '                backend = rest.removeprefix("attention_").removesuffix("_attention")',
        'import re\n                backend = re.search("cudnn|flash|efficient|math", event["name"]).group()')),
}
