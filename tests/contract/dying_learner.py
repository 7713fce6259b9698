"""A learner to be killed: joins a weight group, sends some buckets, then waits.

    python -m tests.contract.dying_learner PORT CHECKPOINT BUCKETS

Says `here` when it can join, and `sent` when the buckets have gone out.
"""

import sys
import time
from pathlib import Path

from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import Sender

if __name__ == "__main__":
    port, checkpoint, buckets = sys.argv[1:]
    print("here", flush=True)
    sender = Sender(int(port), world_size=2, timeout_s=30.0)
    sender.send(read_weights(Path(checkpoint)), int(buckets))
    print("sent", flush=True)
    time.sleep(60)
