"""Common modules: refusals, logs, deadlines, temporary files, child processes."""
