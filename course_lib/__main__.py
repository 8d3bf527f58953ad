"""`python -m course_lib`: the course's command line."""

import sys

from course_lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
