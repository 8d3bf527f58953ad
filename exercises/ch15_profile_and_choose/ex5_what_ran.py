"""Exercise 15.5: from a trace, which attention each layer ran, how long it took, and which layer fell back."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, edits, model_of

BACKENDS = {"cudnn": "cudnn_attention", "flash": "flash_attention", "efficient": "efficient_attention",
            "math": "attention_math"}  # fmt: skip

LAUNCH_OF = {"cudnn": ("cuda_driver", "cuLaunchKernelEx"), "flash": ("cuda_runtime", "cudaLaunchKernelExC"),
             "math": ("cuda_runtime", "cudaLaunchKernel")}  # fmt: skip
LAUNCHES = ("cuda_runtime", "cuda_driver")


def ran(events):
    layers = [event for event in events if event["cat"] == "user_annotation"]
    rows = []
    for layer in sorted(layers, key=lambda event: event["ts"]):
        inside = [e for e in events if layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]]
        names = [event["name"] for event in inside if event["cat"] == "cpu_op"]
        backend = "unknown"
        for name in names:
            if name.startswith("aten::_scaled_dot_product_"):
                backend = name.removeprefix("aten::_scaled_dot_product_").replace("attention", "").strip("_")
        launches = [event["args"]["correlation"] for event in inside if event["cat"] in LAUNCHES]
        kernels = [e for e in events if e["cat"] == "kernel" and e["args"]["correlation"] in launches]
        rows.append((layer["name"], backend, sum(event["dur"] for event in kernels)))
    return rows


def slower(rows):
    fast = sorted(time for _, backend, time in rows if backend != "math")
    if not fast:
        return []
    middle = fast[len(fast) // 2]
    return [(name, time / middle) for name, backend, time in rows if backend == "math"]


def event(cat, name, ts, dur, number=None):
    known = {"cat": cat, "name": name, "ts": ts, "dur": dur}
    return known if number is None else {**known, "args": {"correlation": number}}


def launched(number, at, *took, runs=200.0, names=("cuda_runtime", "cudaLaunchKernel")):
    """A launch, and the kernels that it starts one after another."""
    kernels = [event("kernel", f"kernel_{number}_{n}", runs + 500 * n, dur, number) for n, dur in enumerate(took)]
    return [event(*names, at, 4.0, number), *kernels]


def named(backend, at, dur=3.0):
    return event("cpu_op", f"aten::_scaled_dot_product_{BACKENDS[backend]}", at, dur)


def trace(draw, backends, *, late=True, shuffled=False, others=True, steps=1):
    """Events as PyTorch writes them: a layer's window on the CPU, the operation and the launches in it, and kernels
    that begin when the GPU is free, long after the window is over."""
    events, begin, free, number = [], 100.0, 0.0, draw.integer(10, 90)
    for layer, backend in [*enumerate(backends)] * steps:
        count = {"math": 4, "unknown": 1}.get(backend, 1)
        window = 60.0 + 20 * count
        events.append(event("user_annotation", f"layer {layer}: attention", begin, window))
        if others:
            events.append(event("cpu_op", "aten::scaled_dot_product_attention", begin + 3, window - 5))
        if backend != "unknown":
            events.append(named(backend, begin + 5, window - 9))
        for place in range(count):
            launch, number = begin + 10 + 20 * place, number + draw.integer(1, 5)
            took = draw.integer(*(150, 400) if backend == "math" else (40, 60)) + 0.25
            starts = max(free, launch + 6) if late else launch + 6
            events += launched(number, launch, took, runs=starts, names=LAUNCH_OF.get(backend, LAUNCH_OF["math"]))
            free = starts + took
        begin += window + 30
        if others:  # a matrix product between two layers
            number += 1
            events += launched(number, begin - 20, 70.0, runs=max(free, begin - 14))
            free = max(free, begin - 14) + 70.0
    events.sort(key=lambda event: event["ts"])
    if shuffled:
        events = [events[place] for place in draw.permutation(len(events)).tolist()]
        begins = [event["ts"] for event in events if event["cat"] == "user_annotation"]
        if begins == sorted(begins):  # by chance the layers stand in their order
            events.reverse()
        events.sort(key=lambda event: event["cat"] != "kernel")  # each kernel stands before its launch
    return events


def edge_traces(draw):
    """What the statement leaves to values: edges of windows, names, numbers, launches and kernels by themselves."""
    first, second = event("user_annotation", "block 2", 100.0, 50.0), event("user_annotation", "block 1", 300.0, 50.0)
    n, took = draw.integer(10, 90), [draw.integer(20, 60) + 0.5 for _ in range(4)]
    both = [first, *launched(n, 120.0, took[0]), second, *launched(n + 1, 320.0, took[1])]
    graph = launched(n, 110.0, *took[:3], names=("cuda_runtime", "cudaGraphLaunch"))
    memset = event("cuda_runtime", "cudaMemset", 130.0, 3.0, n + 1)
    own = event("user_annotation", "aten::_scaled_dot_product_attention_math, by hand", 100.0, 50.0)
    return {
        "a CUDA graph: three kernels of one launch": [first, *graph, memset],
        "events where a window begins": [first, named("flash", 100.0), *launched(n, 100.0, took[0])],
        "events where a window ends": [first, named("math", 150.0), *launched(n, 150.0, took[0])],
        "a launch that ends behind its window": [first, *launched(n, 148.0, took[0]), *launched(n + 1, 152.0, took[1])],
        "before the first window, and behind the last": [
            named("math", 20.0), *launched(n + 2, 30.0, took[2]), *both, *launched(n + 3, 400.0, took[3]),
            named("efficient", 410.0)],
        "between two windows": [*both, named("math", 170.0), *launched(n + 2, 180.0, took[2])],
        "a launch with the number 0": [first, named("efficient", 104.0), *launched(0, 120.0, took[0])],
        "layers without a launch": [first, named("flash", 104.0), second],
        "a kernel whose launch is not in the trace": [*both, event("kernel", "early", 110.0, took[2], n + 7)],
        "other operations name a backend": [
            first, named("cudnn", 104.0), event("cpu_op", "aten::_flash_attention_forward", 106.0, 2.0), second,
            event("cpu_op", "aten::cudnn_is_acceptable", 310.0, 2.0), *launched(n, 320.0, took[0])],
        "a window that is named like an operation": [own, named("efficient", 103.0), *launched(n, 120.0, took[0])],
        "a window alone that is named like an operation": [own, *launched(n, 120.0, took[0])],
    }  # fmt: skip


def trace_cases(draw):
    def rows(*backends):
        return [(f"layer {n}: attention", b, float(draw.integer(*((900, 1600) if b == "math" else (40, 60)))))
                for n, b in enumerate(backends)]  # fmt: skip

    eight = ["cudnn"] * 8
    eight[draw.integer(1, 7)] = "math"
    return [
        Case("one layer, flash", (trace(draw, ["flash"], late=False, others=False),), "what_ran"),
        Case("three layers, the second by math", (trace(draw, ["cudnn", "math", "cudnn"]),), "what_ran"),
        Case("eight layers", (trace(draw, eight),), "what_ran"),
        Case("the events in another order", (trace(draw, ["efficient", "math", "flash"], shuffled=True),), "what_ran"),
        Case("two steps: each name twice", (trace(draw, ["flash", "math"], steps=2),), "what_ran"),
        Case("an operation of its own", (trace(draw, ["flash", "unknown", "flash"]),), "what_ran"),
        Case("no layer at all", ([],), "what_ran"),
        *(Case(name, (events,), "what_ran") for name, events in edge_traces(draw).items()),
        Case("one of three", (rows("cudnn", "math", "cudnn"),), "fell_back"),
        Case("two of five", (rows("flash", "math", "flash", "math", "efficient"),), "fell_back"),
        Case("none", (rows("flash", "flash"),), "fell_back"),
        Case("what is unknown did not fall back", (
            [("layer 0", "unknown", 90.0), *rows("math", "flash"), ("layer 3", "unknown", 80.0)],), "fell_back"),
        Case("three of five", (rows("math", "cudnn", "math", "cudnn", "math"),), "fell_back"),
        Case("all by math: nothing to compare with", (rows("math", "math"),), "fell_back"),
        Case("one of six, of different lengths", (
            [*rows("cudnn", "cudnn", "flash", "math", "flash"), ("layer 9: attention", "flash", 500.0)],), "fell_back"),
        Case("two steps: each name twice", (2 * rows("flash", "math") + rows("cudnn", "math"),), "fell_back"),
        Case("math that is faster than the others", (
            [("layer 0", "flash", 51.5), ("layer 1", "math", 12.25), ("layer 2", "math", 51.5)],), "fell_back"),
        Case("times out of order", ([("0", "flash", 90.5), ("1", "math", 700.0), ("2", "cudnn", 40.0),
                                     ("3", "unknown", 50.25), ("4", "math", 300.0)],), "fell_back"),
    ]  # fmt: skip


INSIDE = 'layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]'
LAUNCHED, SUM = 'event["cat"] in LAUNCHES', 'sum(event["dur"] for event in kernels)'
PREFIX = 'name.removeprefix("aten::_scaled_dot_product_")'
CUT = f'{PREFIX}.replace("attention", "").strip("_")'
NAMED = 'name.startswith("aten::_scaled_dot_product_")'
KERNELS = 'e["cat"] == "kernel" and e["args"]["correlation"] in launches'
RAN = (
    *edits("The kernels were found by their time. The GPU runs them later than the CPU launches them, often while "
        "another layer's window is open. Follow `correlation` from the launch to the kernel.",
        kernels_by_time=(KERNELS, f'e["cat"] == "kernel" and {INSIDE}')),
    *edits("An event exactly where a window ends was left out. A window holds both its ends.",
        end_left_out=(INSIDE, INSIDE.replace('<= layer["ts"] +', '< layer["ts"] +'))),
    *edits("An event exactly where a window begins was left out. A window holds both its ends.",
        begin_left_out=(INSIDE, INSIDE.replace('layer["ts"] <= e', 'layer["ts"] < e'))),
    *edits("A launch that ends behind its window was left out. Where its ts lies decides.",
        launch_has_to_end=(LAUNCHED, f'{LAUNCHED} and event["ts"] + event["dur"] <= layer["ts"] + layer["dur"]')),
    *edits("Launches with some names were left out. A launch is known by its category: cuda_runtime or cuda_driver.",
        launch_by_name=(LAUNCHED, f'{LAUNCHED} and "LaunchKernel" in event["name"]')),
    *edits("Kernels whose launch is not in the trace were given to a layer by their time. They belong to none.",
        without_launch=(KERNELS, f'e["cat"] == "kernel" and (e["args"]["correlation"] in launches or {INSIDE} and not '
        'any(n["cat"] in LAUNCHES and n["args"]["correlation"] == e["args"]["correlation"] for n in events))')),
    *edits("A launch with the correlation 0 was taken for none. 0 is a number like any other.",
        number_of_0=(KERNELS, f'{KERNELS} and e["args"]["correlation"]')),
    *edits("The layer whose window begins first got nothing. Its place is 0, and `if place:` takes 0 for no place. Ask "
        "for `place is not None`.", place_of_0=(KERNELS, f"{KERNELS} and rows", NAMED, f"{NAMED} and rows"),
        place_of_0__kernels=(KERNELS, f"{KERNELS} and rows"), place_of_0__backend=(NAMED, f"{NAMED} and rows")),
    *edits("The sum was rounded to whole microseconds. Return it with its fraction.",
        whole_microseconds=(SUM, f"int({SUM})"), whole_microseconds__nearest=(SUM, f"round({SUM})")),
    *edits("Layers without a launch have no row. Each window has one, with 0 microseconds where nothing was launched.",
        no_row=("rows.append((", "launches and rows.append((")),
    *edits("Windows were left out because of their names. Every `user_annotation` is a layer's window.",
        windows_by_name=('if event["cat"] == "user_annotation"',
        'if event["cat"] == "user_annotation" and "attention" in event["name"]')),
    *edits("The rows are in the order of the layers' names. Sort the windows by `ts`.",
        order_of_names=('key=lambda event: event["ts"]', 'key=lambda event: (event["name"], event["ts"])')),
    *edits("An operation that does not name a backend was taken for one that does. Its name begins with "
        "\"aten::_scaled_dot_product_\".", other_operation=('name.startswith("aten::_scaled_dot_product_")',
        "any(word in name for word in BACKENDS)", CUT, "next(word for word in BACKENDS if word in name)")),
    *edits("The name of an event that is no operation was taken for a backend. Look at events of the category cpu_op "
        "alone.", any_category=('if event["cat"] == "cpu_op"', "if True")),
    *edits("The backend was not cut out of the operation's name. \"attention\" stands behind the backend in most "
        "names, and before it in that of \"math\".", cut_wrongly=(CUT, PREFIX), cut_wrongly__first_word=(CUT,
        f'{PREFIX}.split("_")[0]'), cut_wrongly__behind=(CUT, f'{PREFIX}.removesuffix("_attention")')),
    *edits("Every layer got the time of all kernels in the trace. Add up only the kernels that its own launches "
        "started.", all_kernels=(KERNELS, 'e["cat"] == "kernel"')),
    *edits("Only one kernel was counted where there are several. A layer may have several launches, as with \"math\", "
        "and a launch may start several kernels. Add all of them up.",
        one_kernel=(SUM, 'max([event["dur"] for event in kernels], default=0)'),
        one_kernel__of_the_longest_launch=(SUM,
        'max([sum(e["dur"] for e in kernels if e["args"]["correlation"] == n) for n in launches], default=0)'),
        one_kernel__last_of_a_launch=(SUM, 'sum({e["args"]["correlation"]: e["dur"] for e in kernels}.values())'),
        one_kernel__first_of_a_launch=(SUM,
        'sum({e["args"]["correlation"]: e["dur"] for e in kernels[::-1]}.values())'),
        one_kernel__first=(KERNELS, KERNELS.replace("launches", "launches[:1]")),
        one_kernel__of_the_last_launch=(KERNELS, KERNELS.replace("launches",
        '[n for n in launches if any(k["cat"] == "kernel" and k["args"]["correlation"] == n for k in events)][-1:]')),
        one_kernel__last_to_run=(SUM, 'sum([event["dur"] for event in kernels][-1:])')),
    *edits("The time is that of the window on the CPU. Add up the dur of the kernels, which run on the GPU.",
        time_on_the_cpu=(SUM, 'layer["dur"]')),
    *edits("The time is that of the launches on the CPU. Add up the dur of the kernels, which run on the GPU.",
        time_of_launches=(KERNELS, 'e["cat"] in LAUNCHES and e["args"]["correlation"] in launches')),
    *edits("The time of the launches on the CPU was added to that of the kernels. Only what ran on the GPU counts.",
        launches_added=(KERNELS, 'e["cat"] in ("kernel", *LAUNCHES) and e["args"]["correlation"] in launches')),
    *edits("Launches outside all windows were given to a layer. They belong to none: the matrix product between two "
        "layers, for example, is not attention.", outside_counted__until_the_next=(INSIDE,
        'layer["ts"] <= e["ts"] and not any(layer["ts"] < x["ts"] <= e["ts"] for x in layers)'),
        outside_counted__before_the_first=(INSIDE,
        f'{INSIDE} or e["ts"] < layer["ts"] == min(x["ts"] for x in layers)'),
        outside_counted=('for event in inside if event["cat"] in LAUNCHES', 'for event in (inside if layer["ts"] > '
        'min(x["ts"] for x in layers) else [e for e in events if not any(x["ts"] <= e["ts"] <= x["ts"] + x["dur"] '
        'for x in layers if x is not layer)]) if event["cat"] in LAUNCHES')),
    *edits("A kernel that comes before its launch in the list was lost. The events are in no order, so collect all "
        "launches first.", launch_behind_its_kernel=(KERNELS, KERNELS + ' and any(n["cat"] in LAUNCHES and '
        'n["args"]["correlation"] == e["args"]["correlation"] for n in events[: events.index(e)])')),
    *edits("Windows of the same name were merged. A trace of two steps has each layer twice: return a row for each "
        "window.", windows_merged__added=("return rows", "return [(name, {row[0]: row for row in rows}[name][1], "
        "sum(row[2] for row in rows if row[0] == name)) for name in dict.fromkeys(row[0] for row in rows)]"),
        windows_merged=("return rows", "return list({row[0]: row for row in rows}.values())"),
        windows_merged__first=("return rows", "return list({row[0]: row for row in reversed(rows)}.values())[::-1]")),
    *edits("Launches of the category cuda_driver were left out. Some libraries, such as cuDNN, launch through the "
        "driver.", driver_left_out=('event["cat"] in LAUNCHES', 'event["cat"] == "cuda_runtime"')),
    *edits("The rows are in the order of the events, but events are in no order. Sort the windows by `ts`.",
        order_of_the_file=('sorted(layers, key=lambda event: event["ts"])', "layers")),
    *edits("The backend is the whole name of the operation. Cut off what stands before and after the backend.",
        whole_name=('name.removeprefix("aten::_scaled_dot_product_").replace("attention", "").strip("_")', "name")),
    *edits("The operation was looked for in the whole trace. Look inside the layer's own window.",
        backend_of_another=('names = [event["name"] for event in inside',
        'names = [event["name"] for event in events')),
    *edits("A layer without such an operation was called \"math\". If no operation names a backend, it is \"unknown\".",
        unknown_as_math=('backend = "unknown"', 'backend = "math"')),
)  # fmt: skip
FAST = 'sorted(time for _, backend, time in rows if backend != "math")'
MIDDLE = "fast[len(fast) // 2]"
PAIRS = '[(name, time / middle) for name, backend, time in rows if backend == "math"]'
SLOWER = (
    *edits("The time was divided by the mean. One slow layer moves a mean, so take the median of the layers that did "
        "not fall back.", mean=("middle = fast[len(fast) // 2]", "middle = sum(fast) / len(fast)")),
    *edits("The median was taken over all layers. Take it only over the layers that did not fall back, because you "
        "compare with those.",
        median_of_all=(' if backend != "math")', ")"), median_of_all__none=(' if backend != "math")', ")", "not fast",
        'all(backend == "math" for _, backend, _ in rows)')),
    *edits("Layers with an unknown backend were left out of the median. They did not run \"math\", so include them.",
        unknown_left_out=(' if backend != "math")', ' if backend not in ("math", "unknown"))')),
    *edits("The times were not sorted before the one in the middle was taken.",
        not_sorted=(FAST, FAST.replace("sorted", "list"))),
    *edits("Another time than that at index len // 2 was taken. Take it also where two stand in the middle.",
        other_middle=(MIDDLE, f"({MIDDLE} + fast[(len(fast) - 1) // 2]) / 2"),
        other_middle__lower=(MIDDLE, "fast[(len(fast) - 1) // 2]")),
    *edits("Layers of one name were merged. Each row that ran \"math\" has an entry of its own.",
        names_merged=(PAIRS, f"list(dict({PAIRS}).items())")),
    *edits("A layer that ran \"math\" but took no longer was left out. It fell back as well.",
        only_slower=(PAIRS, PAIRS.replace('== "math"', '== "math" and time > middle'))),
    *edits("The entries are in the order of their times. Leave them in the order of the rows.",
        by_time=(PAIRS, f"sorted({PAIRS}, key=lambda pair: -pair[1])")),
    *edits("The result is how much longer the layers took. Return how many times as long: do not take 1 away.",
        less_one=("time / middle", "time / middle - 1")),
    *edits("All layers ran \"math\", and they were returned. Then there is nothing to compare with, and the list is "
        "empty.", all_math=("return []", "return [(name, 1.0) for name, _, _ in rows]")),
    *edits("The time was divided by that of the fastest layer. Take the median of the layers that did not fall back.",
        fastest=("fast[len(fast) // 2]", "fast[0]")),
    *edits("The ratio is upside down. Divide the layer's time by the median, so that it says how many times as long "
        "the layer took.", upside_down=("time / middle", "middle / time")),
    *edits("The time itself was returned. Divide it by the median of the layers that did not fall back.",
        no_ratio=("time / middle", "time")),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.5",
    title="What ran, and which layer fell back",
    entries=("what_ran", "fell_back"),
    cases=trace_cases,
    oracle={"what_ran": ran, "fell_back": slower},
    models=(model_of(ran, RAN, entry="what_ran"), model_of(slower, SLOWER, entry="fell_back")),
    mistakes=(
        Mistake(
            "nothing_to_compare",
            "If all layers ran \"math\", there is no time in the middle of the others. Return an empty list first.",
            when=lambda case, seen, got: bool(seen.error) and case.entry == "fell_back",
        ),
    ),
    hints=(
        "what_ran: collect the events with cat == \"user_annotation\" and sort them by ts. For each of them, collect "
        "the events whose ts lies in its window, from ts to ts + dur.",
        "The backend: among the window's events with cat == \"cpu_op\" there is one whose name begins with "
        "\"aten::_scaled_dot_product_\". Ignore the outer aten::scaled_dot_product_attention, without the underscore: "
        "it does not name a backend.",
        "The time: each launch in the window has an args[\"correlation\"]. A kernel with the same number was started "
        "by that launch, no matter when it ran. Add up the dur of these kernels.",
        "fell_back: sort the times of the layers that did not run \"math\", and take the one at index len // 2. "
        "Divide the times of the layers that ran \"math\" by it.",
    ),
)  # fmt: skip
