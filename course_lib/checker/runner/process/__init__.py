"""The worker's program. Only `wire` is imported by the course; the rest runs in the worker process."""
