"""Common modules: logs, deadlines, temporary files, child processes."""
