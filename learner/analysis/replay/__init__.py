"""Replay: a step of channel B, rebuilt from its log and compared with it (REPLAY-01).

    RunFolder -> LoggedStep      rebuild.py   the answers of all processes
    Rebuilder                    rebuild.py   ids -> parse -> match -> target -> packs -> metrics
    compare                      compare.py   logged against rebuilt, stage by stage
    tables and sentences         show.py

Requires the config and log of the run and the tokenizer of its model; no server, weights or images.
"""
