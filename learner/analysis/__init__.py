"""Scores and shows answers: evaluation, report, replay, and the live view of a run."""
