"""Replay: steps of channel B, computed again from their log and compared with it (REPLAY-01).

    RunFolder -> StepAnswer      the answers of all processes
    rebuild, first_difference    rebuild.py   ids -> parse -> match -> target, against the log
    tables and sentences         show.py

Requires the config and log of the run and the tokenizer of its model; no server, weights or images.
"""
