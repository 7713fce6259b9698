"""Launch, doctor, estimate, init, export, demo and eval: commands around a run."""
