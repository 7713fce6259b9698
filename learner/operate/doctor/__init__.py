"""`learner doctor`: the start-up checks of a run, those of the machine, one rollout, one push."""
