"""What a run needs of GPUs, without any: its own step on fake tensors (FULL-05).

config, samples -> step_cost() of each channel -> Estimate -> tables, JSON, refusal
"""
