"""Handing in and grading: `submit` in a notebook, and `python -m course_lib grade` behind the command line.

A learner hands in a notebook, a percent-format script or the small file that `submit` writes. `grade` takes any number
of these in any mixture, judges every exercise again from its source, and never believes what a file says about itself.

    submission   the file that `submit` writes: versioned JSON, sources included
    handing_in   makes it from what a learner's attempts and cells hold
    reading      a stranger's file to the sources in it, or one sentence on why not
    judging      one source to one row
    journal      the rows so far, one line each, so that an interrupted run goes on where it stopped
    tables       the rows as CSV and JSON
    annotations  the verdicts of `check`, as GitHub shows them beside a notebook
    sandbox      bubblewrap around the worker that runs strangers' code
    cluster      Dask: this machine's processes, or a cluster that is there
    run          all of it, in order
"""

from course_lib.grading.handing_in import submit

__all__ = ["submit"]
