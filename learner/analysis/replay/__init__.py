"""A step of channel B, built again from its log alone, and compared with it (REPLAY-01).

    RunFolder -> StepLog         the answers of all processes, or why there are none
    Rebuilder                    ids -> parse -> match -> target -> length -> packs -> metrics,
                                 by the functions that training calls
    compare                      what was logged against what was rebuilt, stage by stage
    show                         the verdict, and all that became of one answer

It takes the config and the log of the run and the tokenizer of its model; no server, no weights
and no images. Its own modules import no torch; transformers does, to read the tokenizer.
"""

from learner.analysis.replay.rebuild import (
    Difference,
    LoggedStep,
    Rebuilder,
    Replayed,
    StepLog,
    compare,
)

__all__ = ["Difference", "LoggedStep", "Rebuilder", "Replayed", "StepLog", "compare"]
