"""What a run needs of GPUs, without any (FULL-05): `step.py` calculates, `report.py` prints."""
