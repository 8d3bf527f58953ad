"""Where the course lives and where it may write.

The course's root is the folder that holds `course_lib`, `solutions` and `exercises`. What a learner makes (attempts,
progress, measured ceilings) goes to `.course/` in that root, or to the folder that COURSE_HOME names.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def course_home() -> Path:
    """The course's writable folder, made when missing.

    Raises:
        OSError: the folder cannot be made; the message names it and says which variable moves it.
    """
    home = Path(os.environ.get("COURSE_HOME") or ROOT / ".course").expanduser()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"The course cannot write to {home} ({error.strerror}). Set COURSE_HOME to a folder that you can write to."
        ) from error
    return home
