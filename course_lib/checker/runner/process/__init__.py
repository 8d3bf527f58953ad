"""The worker's program. The course imports `wire` and `pace`; the rest runs in the worker alone."""
