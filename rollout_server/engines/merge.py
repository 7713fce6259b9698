"""Merge of a LoRA or DoRA adapter into its base checkpoint, before engines start.

    python -m rollout_server.engines.merge PARENT_PID ADAPTER OUT

The merged checkpoint stays in the server's scratch folder, because rebuilt engines load it again.
The merge runs in a separate process, which ends with the server, so that its memory is freed.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_server.settings.options import ServerSettings
from shared_contracts.checkpoints import checkpoint_chain
from shared_contracts.errors import RunError
from shared_contracts.machine import signal_at_death_of


def with_merged_model(settings: ServerSettings) -> ServerSettings:
    """Return the settings with a merged `checkpoint`.

    Raises RunError if the merge fails, or is not over within `start_seconds`.
    """
    if len(checkpoint_chain(settings.model, "model")) == 1:
        return settings
    out = Path(tempfile.mkdtemp(prefix="merged-"))
    command = [sys.executable, "-m", "rollout_server.engines.merge"]
    command += [str(os.getpid()), str(settings.model), str(out)]
    limit_s = settings.start_seconds
    try:
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        found = f"the adapter {settings.model} is not merged within {limit_s:g} s (--start-seconds)"
        raise RunError(f"model: {found}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise RunError(f"model: the adapter {settings.model} cannot be merged: {reason}")
    return settings.serving(out)


def merge(folder: Path, out: Path) -> None:
    """Write an adapter, merged into its base, as a checkpoint."""
    from peft import PeftModel  # slow
    from transformers import AutoModelForImageTextToText, AutoProcessor

    chain = checkpoint_chain(folder, "model")
    *adapters, base = chain
    model = AutoModelForImageTextToText.from_pretrained(base, dtype="auto", trust_remote_code=False)
    for adapter in reversed(adapters):
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    model.save_pretrained(out)
    holder = next((each for each in chain if (each / "tokenizer.json").is_file()), folder)
    AutoProcessor.from_pretrained(holder, trust_remote_code=False).save_pretrained(out)


if __name__ == "__main__":
    signal_at_death_of(int(sys.argv[1]), signal.SIGKILL)
    merge(*map(Path, sys.argv[2:]))
