"""Scores of answers (`evaluation`), and views of a run (`report`, `replay`)."""
