"""What the course and the worker's program both use. A file here imports nothing of the course."""
