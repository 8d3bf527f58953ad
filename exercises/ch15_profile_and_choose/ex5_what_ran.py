"""Exercise 15.5: from a trace, which attention each layer ran, how long it took, and which layer fell back."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of

BACKENDS = {"cudnn": "cudnn_attention", "flash": "flash_attention", "efficient": "efficient_attention",
            "math": "attention_math"}  # fmt: skip

LAUNCH_OF = {"cudnn": ("cuda_driver", "cuLaunchKernelEx"), "flash": ("cuda_runtime", "cudaLaunchKernelExC")}
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


def trace(draw, backends, *, late=True, shuffled=False, others=True, steps=1):
    """Events as PyTorch writes them: a layer's window on the CPU, the operation and the launches in it, and kernels
    that begin when the GPU is free, long after the window is over."""
    events, begin, free, number = [], 100.0, 0.0, draw.integer(10, 90)
    for layer, backend in [*enumerate(backends)] * steps:
        count = {"math": 4, "unknown": 1}.get(backend, 1)
        window = 60.0 + 20 * count
        events.append({"cat": "user_annotation", "name": f"layer {layer}: attention", "ts": begin, "dur": window})
        if others:
            events.append({"cat": "cpu_op", "name": "aten::scaled_dot_product_attention", "ts": begin + 3,
                           "dur": window - 5})  # fmt: skip
        if backend != "unknown":
            events.append({"cat": "cpu_op", "name": f"aten::_scaled_dot_product_{BACKENDS[backend]}", "ts": begin + 5,
                           "dur": window - 9})  # fmt: skip
        for place in range(count):
            launch, number = begin + 10 + 20 * place, number + draw.integer(1, 5)
            took = float(draw.integer(150, 400) if backend == "math" else draw.integer(40, 60))
            category, name = LAUNCH_OF.get(backend, ("cuda_runtime", "cudaLaunchKernel"))
            events.append({"cat": category, "name": name, "ts": launch, "dur": 4.0, "args": {"correlation": number}})
            starts = max(free, launch + 6) if late else launch + 6
            events.append({"cat": "kernel", "name": f"kernel_{place}_of_{backend}", "ts": starts, "dur": took,
                           "args": {"correlation": number}})  # fmt: skip
            free = starts + took
        begin += window + 30
        if others:  # a matrix product between two layers
            number += 1
            events.append({"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin - 20, "dur": 4.0,
                           "args": {"correlation": number}})  # fmt: skip
            events.append({"cat": "kernel", "name": "nvjet_product", "ts": max(free, begin - 14), "dur": 70.0,
                           "args": {"correlation": number}})  # fmt: skip
            free = max(free, begin - 14) + 70.0
    events.sort(key=lambda event: event["ts"])
    if shuffled:
        events = [events[place] for place in draw.permutation(len(events)).tolist()]
        begins = [event["ts"] for event in events if event["cat"] == "user_annotation"]
        if begins == sorted(begins):  # by chance the layers stand in their order
            events.reverse()
    return events


def graph_of(draw):
    """A layer that replays a CUDA graph: one launch of three kernels, and a launch that no kernel belongs to."""
    number = draw.integer(10, 90)
    took = [float(draw.integer(20, 60)) for _ in range(3)]
    return [
        {"cat": "user_annotation", "name": "layer 0: attention", "ts": 100.0, "dur": 50.0},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 110.0, "dur": 9.0, "args": {"correlation": number}},
        {"cat": "cuda_runtime", "name": "cudaMemset", "ts": 130.0, "dur": 3.0, "args": {"correlation": number + 1}},
        *({"cat": "kernel", "name": f"kernel_{place}", "ts": 200.0 + 70 * place, "dur": dur,
           "args": {"correlation": number}} for place, dur in enumerate(took)),
    ]  # fmt: skip


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
        Case("a CUDA graph: three kernels of one launch", (graph_of(draw),), "what_ran"),
        Case("one of three", (rows("cudnn", "math", "cudnn"),), "fell_back"),
        Case("two of five", (rows("flash", "math", "flash", "math", "efficient"),), "fell_back"),
        Case("none", (rows("flash", "flash"),), "fell_back"),
        Case("what is unknown did not fall back", (
            [("layer 0", "unknown", 90.0), *rows("math", "flash"), ("layer 3", "unknown", 80.0)],), "fell_back"),
        Case("three of five", (rows("math", "cudnn", "math", "cudnn", "math"),), "fell_back"),
        Case("all by math: nothing to compare with", (rows("math", "math"),), "fell_back"),
        Case("one of six, of different lengths", (
            [*rows("cudnn", "cudnn", "flash", "math", "flash"), ("layer 9: attention", "flash", 500.0)],), "fell_back"),
    ]  # fmt: skip


KERNELS = 'e["cat"] == "kernel" and e["args"]["correlation"] in launches'
RAN = (
    *edits("The kernels were found by their time. The GPU runs them later than the CPU launches them, often while "
        "another layer's window is open. Follow `correlation` from the launch to the kernel.",
        kernels_by_time=(KERNELS, 'e["cat"] == "kernel" and layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]')),
    *edits("Every layer got the time of all kernels in the trace. Add up only the kernels that its own launches "
        "started.",
        all_kernels=(KERNELS, 'e["cat"] == "kernel"')),
    *edits("Only one kernel was counted where there are several. A layer may have several launches, as with \"math\", "
        "and a launch may start several kernels. Add all of them up.",
        one_kernel=('sum(event["dur"] for event in kernels)', 'max([event["dur"] for event in kernels], default=0)'),
        one_kernel__of_the_longest_launch=('sum(event["dur"] for event in kernels)',
        'max([sum(e["dur"] for e in kernels if e["args"]["correlation"] == n) for n in launches], default=0)'),
        one_kernel__last_of_a_launch=('sum(event["dur"] for event in kernels)',
        'sum({e["args"]["correlation"]: e["dur"] for e in kernels}.values())'),
        one_kernel__first=(KERNELS, KERNELS.replace("launches", "launches[:1]")),
        one_kernel__of_the_last_launch=('sum(event["dur"] for event in kernels)',
        'sum([e["dur"] for e in kernels if e["args"]["correlation"] == '
        '[n for n in launches if any(k["args"]["correlation"] == n for k in kernels)][-1]])'),
        one_kernel__last_to_run=('sum(event["dur"] for event in kernels)',
        'sum([event["dur"] for event in kernels][-1:])'),
        one_kernel__first_to_run=('sum(event["dur"] for event in kernels)',
        'sum([event["dur"] for event in kernels][:1])')),
    *edits("The time is that of the window on the CPU. Add up the dur of the kernels, which run on the GPU.",
        time_on_the_cpu=('sum(event["dur"] for event in kernels)', 'layer["dur"]')),
    *edits("The time is that of the launches on the CPU. Add up the dur of the kernels, which run on the GPU.",
        time_of_launches=(KERNELS, 'e["cat"] in LAUNCHES and e["args"]["correlation"] in launches')),
    *edits("The time of the launches on the CPU was added to that of the kernels. Only what ran on the GPU counts.",
        launches_added=(KERNELS, 'e["cat"] in ("kernel", *LAUNCHES) and e["args"]["correlation"] in launches')),
    *edits("Launches outside all windows were given to a layer. They belong to none: the matrix product between two "
        "layers, for example, is not attention.",
        outside_counted=('["correlation"] for event in inside', '["correlation"] for event '
        'in ([e for e in events if not any(x["ts"] <= e["ts"] <= x["ts"] + x["dur"] for x in layers if x is not layer)]'
        ' if layer is min(layers, key=lambda event: event["ts"]) else inside)')),
    *edits("A kernel that comes before its launch in the list was lost. The events are in no order, so collect all "
        "launches first.", launch_behind_its_kernel=(KERNELS, KERNELS + ' and any(n["cat"] in LAUNCHES and '
        'n["args"]["correlation"] == e["args"]["correlation"] for n in events[: events.index(e)])')),
    *edits("Windows of the same name were merged. A trace of two steps has each layer twice: return a row for each "
        "window.",
        windows_merged=("return rows", "return list({row[0]: row for row in rows}.values())"),
        windows_merged__first=("return rows", "return list({row[0]: row for row in reversed(rows)}.values())[::-1]")),
    *edits("Launches of the category cuda_driver were left out. Some libraries, such as cuDNN, launch through the "
        "driver.",
        driver_left_out=('event["cat"] in LAUNCHES', 'event["cat"] == "cuda_runtime"')),
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
SLOWER = (
    *edits("The time was divided by the mean. One slow layer moves a mean, so take the median of the layers that did "
        "not fall back.",
        mean=("middle = fast[len(fast) // 2]", "middle = sum(fast) / len(fast)")),
    *edits("The median was taken over all layers. Take it only over the layers that did not fall back, because you "
        "compare with those.",
        median_of_all=(' if backend != "math")', ")"), median_of_all__none=(' if backend != "math")', ")", "not fast",
        'all(backend == "math" for _, backend, _ in rows)')),
    *edits("Layers with an unknown backend were left out of the median. They did not run \"math\", so include them.",
        unknown_left_out=(' if backend != "math")', ' if backend not in ("math", "unknown"))')),
    *edits("The time was divided by that of the fastest layer. Take the median of the layers that did not fall back.",
        fastest=("fast[len(fast) // 2]", "fast[0]")),
    *edits("The ratio is upside down. Divide the layer's time by the median, so that it says how many times as long "
        "the layer took.", upside_down=("time / middle",
        "middle / time")),
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
