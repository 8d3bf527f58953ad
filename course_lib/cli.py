"""The course's command line: python -m course_lib doctor | check | grade | progress | reset | chat | bench | build …

Exit status: 0 when everything attempted passed, 1 when something did not, 2 when the command could not run; then one
line on the error stream says why. What a command needs is imported by that command, so that --help is there at once.
"""

import argparse
import json
import os
import pkgutil
import secrets
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

from course_lib.serving.proposals import MOST_PROPOSED

PASSED, NOT_PASSED, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130
NO_FAULT = ("passed", "not_attempted", "unsupported")


class CannotRun(Exception):
    """A command that cannot do what was asked; the text is the one line that says why and what to do."""


def doctor(arguments: argparse.Namespace) -> int:
    return import_module("course_lib.hardware.doctor.report").main() or PASSED


def check(arguments: argparse.Namespace) -> int:
    """Prints the verdicts of files; one that cannot be read does not keep the others from being checked."""
    if arguments.json:
        require_writable(arguments.json)
    if arguments.github and "GITHUB_STEP_SUMMARY" not in os.environ:
        raise CannotRun("--github is for a step of a GitHub workflow, where GITHUB_STEP_SUMMARY names the summary.")
    checker = import_module("course_lib.checker")
    verdicts, problems = [], {}
    # What an answer printed stands in its verdict, and could be read as a command of the workflow.
    token = secrets.token_hex(16)
    if arguments.github:
        print(f"::stop-commands::{token}")
    for file in arguments.files:
        try:
            found = checker.check_file(file, exercise=arguments.exercise)
            if not found:
                raise checker.CourseError(f"{file}: holds no exercise; its cell begins with '# Exercise 3.2 · Title'.")
        except checker.CourseError as error:
            problems[str(file)] = str(error)
            continue
        if len(arguments.files) > 1:
            print(f"{file}:")
        for verdict in found:
            print(verdict, flush=True)
        verdicts += [{**verdict.as_dict(), "file": str(file)} for verdict in found]
    if verdicts:
        counts = Counter(verdict["outcome"].replace("_", " ") for verdict in verdicts)
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if arguments.json:
        import_module("course_lib.builder.keeping").write(
            arguments.json, json.dumps(verdicts, ensure_ascii=False, indent=2) + "\n"
        )
    if arguments.github:
        github = import_module("course_lib.grading.annotations")
        print(f"::{token}::", *github.commands(verdicts, problems), sep="\n")
        with open(os.environ["GITHUB_STEP_SUMMARY"], "a", encoding="utf-8") as page:
            page.write(github.summary(verdicts, problems))
    if problems:
        raise CannotRun("\n".join(problems.values()))
    return PASSED if all(verdict["outcome"] in NO_FAULT for verdict in verdicts) else NOT_PASSED


def require_writable(path: Path, option: str = "--json") -> None:
    """Says before a minute's checking, not after it, that the result has nowhere to go."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CannotRun(f"{path}: cannot be written; {option} takes a file in a folder that exists and is yours.")


def grade(arguments: argparse.Namespace) -> int:
    """Judges what others handed in; says in the end how it went and where the rows are."""
    require_writable(arguments.out, "--out")
    if arguments.json:
        require_writable(arguments.json)
    run, checker = import_module("course_lib.grading.run"), import_module("course_lib.checker")
    try:
        rows = run.grade(
            arguments.files,
            arguments.out,
            arguments.json,
            jobs=arguments.jobs,
            scheduler=arguments.scheduler,
            sandboxed=not arguments.unsandboxed,
        )
    except checker.CourseError as error:
        raise CannotRun(str(error)) from error
    except KeyboardInterrupt:
        print(f"Interrupted. {arguments.out} has the rows so far; the same command goes on.", file=sys.stderr)
        return INTERRUPTED
    counts = Counter(row["outcome"].replace("_", " ") for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    print(f"{len(rows)} rows of {len({row['file'] for row in rows})} files in {arguments.out}")
    return PASSED if all(row["outcome"] in NO_FAULT for row in rows) else NOT_PASSED


def progress(arguments: argparse.Namespace) -> int:
    checker = import_module("course_lib.checker")
    try:
        print(checker.progress())
    except checker.CourseError as error:
        raise CannotRun(str(error)) from error
    return PASSED


def reset(arguments: argparse.Namespace) -> int:
    builder = import_module("course_lib.builder")
    try:
        notebook, copy = builder.reset(arguments.chapter)
    except builder.BuildError as error:
        raise CannotRun(str(error)) from error
    print(f"{short(notebook)} is as it was given." + (f" Yours is kept as {short(copy)}." if copy else ""))
    return PASSED


def build(arguments: argparse.Namespace) -> int:
    builder = import_module("course_lib.builder")
    if arguments.check and (arguments.solved or arguments.out):
        raise CannotRun("--check compares the learner's notebooks: it goes with neither --solved nor --out.")
    out = arguments.out or (Path("build/solved") if arguments.solved else None)
    try:
        if arguments.check:
            differing = builder.stale(arguments.names)
            for path, reason in differing:
                print(f"{short(path)} {reason}: `make notebooks` builds it.", file=sys.stderr)
            return NOT_PASSED if differing else PASSED
        built = builder.build(arguments.names, out=out, with_answers=arguments.solved)
    except builder.BuildError as error:
        raise CannotRun(str(error)) from error
    print(f"Built {', '.join(str(short(path)) for path in built) or 'nothing: there are no chapters in solutions/'}.")
    return PASSED


def site(arguments: argparse.Namespace) -> int:
    """Builds the course as pages; says where they lie, how large they are and how long that took."""
    builder, building = import_module("course_lib.builder"), import_module("course_lib.site.building")
    try:
        print(building.build_site(arguments.names, work=(arguments.out or building.WORK).resolve()))
    except builder.BuildError as error:
        raise CannotRun(str(error)) from error
    except building.CannotBuild as error:
        print(error, file=sys.stderr)
        return NOT_PASSED
    return PASSED


def chat(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("kernels", "new_tokens", "temperature", "seed", "speculate")}
    try:
        import_module("course_lib.serving.terminal").chat(arguments.model, arguments.question, **options)
    except ValueError as error:
        raise CannotRun(str(error)) from error
    return PASSED


def serve(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("host", "port", "pages", "kernels", "speculate")}
    try:
        import_module("course_lib.serving.server.command").serve(arguments.model, **options)
    except ValueError as error:
        raise CannotRun(str(error)) from error
    return PASSED


def bench(arguments: argparse.Namespace) -> int:
    folder = Path(__file__).parent / "bench"
    known = sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.name.startswith("_"))
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise CannotRun(f"There is no benchmark '{unknown[0]}'; there are: {', '.join(known) or 'none yet'}.")
    if arguments.list or not known:
        print("\n".join(known) or "There are no benchmarks yet.")
        return PASSED
    statuses = [import_module(f"course_lib.bench.{name}").main([]) or PASSED for name in arguments.names or known]
    return max(statuses)


def short(path: Path) -> Path:
    """The path from where the command was given, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, not {text!r}")
    return number


def not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number from 0 on is needed, not {text!r}")
    return number


def model_options(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--model", default="SmolLM2-135M-Instruct", metavar="MODEL",
        help="a folder, a .gguf file, or a repository of the Hugging Face hub (%(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--kernels", action=argparse.BooleanOptionalAction,
        help="the course's kernels, or PyTorch's operations (kernels on a GPU; interpreted, a token takes seconds)",
    )  # fmt: skip
    made.add_argument(
        "--speculate", type=int, choices=range(MOST_PROPOSED + 1), default=0, metavar="N",
        help=f"guess up to N tokens a step, 0 to {MOST_PROPOSED}, from the text so far; the answer is the same without "
        "(%(default)s)",
    )  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m course_lib", description="Write, check and measure kernels.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(function, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(function.__name__, help=summary, description=summary)
        made.set_defaults(run=function)
        return made

    command(doctor, "Say what this machine is, what will and will not work on it, and what to do about that.")

    made = command(check, "Check the exercises of notebooks or .py files; status 0 when all that was attempted passed.")
    made.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a notebook, or a .py file in percent format")
    made.add_argument("--exercise", metavar="ID", help='only this one, such as "3.2"')
    made.add_argument("--json", metavar="OUT", type=Path, help="write the verdicts to this file, as a list of objects")
    made.add_argument(
        "--github", action="store_true", help="in a workflow: also annotations, and a table as its summary"
    )

    made = command(grade, "Judge what others handed in: notebooks, .py files and submission files, to CSV and JSON.")
    made.add_argument("files", nargs="+", metavar="FILE", type=Path, help="files, or folders to search for them")
    made.add_argument("--out", metavar="CSV", type=Path, required=True, help="the table; an interrupted run goes on")
    made.add_argument("--json", metavar="OUT", type=Path, help="the same with seeds and cases, as a list of objects")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--jobs", metavar="N", type=positive, help="processes on this machine (one for each core)")
    where.add_argument("--scheduler", metavar="ADDRESS", help="a Dask cluster that is there, such as tcp://host:8786")
    made.add_argument("--unsandboxed", action="store_true", help="without bubblewrap, if you trust the files")

    command(progress, "Show what you have passed and what is open.")

    made = command(reset, "Give a chapter's notebook back as it was given; yours is kept beside it under a dated name.")
    made.add_argument("chapter", metavar="CHAPTER", help='its number or name, such as "03"')

    made = command(chat, "Talk to a published model on the course's kernels; its weights are fetched at the first use.")
    made.add_argument("question", nargs="?", metavar="QUESTION", help="answer this, and end (lines from the terminal)")
    model_options(made)
    made.add_argument(
        "--tokens", dest="new_tokens", type=positive, default=256, metavar="N", help="at most (%(default)s)"
    )
    made.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws above temperature 0 (%(default)s)")

    made = command(serve, "Serve a published model at OpenAI's addresses, /v1/chat/completions and /v1/models.")
    model_options(made)
    made.add_argument("--host", default="127.0.0.1", help="where to listen (%(default)s: this machine alone)")
    made.add_argument("--port", type=positive, default=8000, help="(%(default)s)")
    made.add_argument("--pages", type=positive, metavar="N", help="of the cache, 16 tokens each (what fits)")

    made = command(bench, "Measure the course's kernels beside the libraries' own.")
    made.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (all)")
    made.add_argument("--list", action="store_true", help="only name them")

    made = command(build, "Build the notebooks from solutions/; one that holds your work is never built over.")
    made.add_argument("names", nargs="*", metavar="NAME", help='which chapters, such as "03" (all)')
    made.add_argument("--check", action="store_true", help="build nothing; status 1 when a notebook differs")
    made.add_argument("--solved", action="store_true", help="with the answers in, where each check must pass")
    made.add_argument("--out", metavar="DIR", type=Path, help="another folder than notebooks/ (build/solved if solved)")

    made = command(site, "Build the course as pages: every chapter run without a GPU, as given and solved.")
    made.add_argument(
        "names", nargs="*", metavar="NAME", help='run only these, such as "03"; the others without outputs'
    )
    made.add_argument("--out", metavar="DIR", type=Path, help="another folder than build/site")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the arguments (those of the process by default) give, and returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? for ✓, and no traceback
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return PASSED
    try:
        return arguments.run(arguments)
    except (CannotRun, OSError) as error:
        print(error, file=sys.stderr)
        return COULD_NOT_RUN
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "course_lib":
            raise
        advice = "`python -m course_lib doctor` says what to do."
        print(f"This Python ({sys.executable}) lacks {error.name}: {advice}", file=sys.stderr)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
