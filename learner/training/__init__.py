"""The training loop: from a batch of samples to one optimizer step, and the whole run."""
