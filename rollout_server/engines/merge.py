"""A LoRA or DoRA adapter as the model to serve: merged into its base before engines start.

    python -m rollout_server.engines.merge ADAPTER OUT

Engines read their checkpoint again when they are rebuilt, so the merged one stays in the server's
scratch folder. Merging runs in a process of its own, whose memory ends with it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_server.settings.options import ServerSettings
from shared_contracts.adapters import checkpoint_chain, folder_with
from shared_contracts.errors import RunError


def with_merged_model(settings: ServerSettings) -> ServerSettings:
    """Settings of which `checkpoint` is no adapter; raises RunError where one cannot be merged."""
    if len(checkpoint_chain(settings.model, "model")) == 1:
        return settings
    out = Path(tempfile.mkdtemp(prefix="merged-"))
    command = [sys.executable, "-m", "rollout_server.engines.merge", str(settings.model), str(out)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise RunError(f"model: the adapter {settings.model} cannot be merged: {reason}")
    return settings.serving(out)


def merge(folder: Path, out: Path) -> None:
    """Write the checkpoint that an adapter and what it is over make together."""
    from peft import PeftModel  # seconds
    from transformers import AutoModelForImageTextToText, AutoProcessor

    *adapters, base = checkpoint_chain(folder, "model")
    model = AutoModelForImageTextToText.from_pretrained(base, dtype="auto", trust_remote_code=False)
    for adapter in reversed(adapters):
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    model.save_pretrained(out)
    holder = folder_with(folder, "tokenizer.json", "model")
    AutoProcessor.from_pretrained(holder, trust_remote_code=False).save_pretrained(out)


if __name__ == "__main__":
    merge(*map(Path, sys.argv[1:]))
