"""A run in the terminal, from its files alone, while it goes on or after its end.

    tail      what is new in a log, also of a run that went back to a checkpoint
    events    what a person should know, numbered as it was seen
    watched   the run as its files tell it
    sections  parts of the view as lines, fitted to a width
    frame     the parts that fit a terminal
    show      a screen that is drawn again and again, or plain lines

Nothing is written into the run folder, and nothing is asked of servers or processes.
"""

from learner.watch.show import watch_run

__all__ = ["watch_run"]
