"""`learner train --config FILE` in a process that kills itself.

python killed_learner.py FILE EVENT ENDING [SECONDS]

at the first audit event EVENT (such as `open` or `os.rename`) on a path with this ending, or so
many seconds later.
"""

import os
import signal
import sys
import threading

from learner.cli import main


def kill_at(event: str, ending: str, seconds: str = "0") -> None:
    """SIGKILL: nothing is flushed, closed or removed."""
    timer = threading.Timer(float(seconds), lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True

    def hook(seen: str, arguments: tuple[object, ...]) -> None:
        if seen == event and str(arguments[0]).endswith(ending) and not timer.is_alive():
            if float(seconds):
                timer.start()
            else:
                timer.function()

    sys.addaudithook(hook)


if __name__ == "__main__":
    config, *moment = sys.argv[1:]
    if moment:
        kill_at(*moment)
    sys.argv = ["learner", "train", "--config", config]
    main()
