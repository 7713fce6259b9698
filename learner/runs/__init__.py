"""The run folder: its files, logs, checkpoints and metrics, and where a run resumes."""
