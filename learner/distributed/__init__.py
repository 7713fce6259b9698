"""The processes of a run: agreement, failures, waiting, and the process group."""
