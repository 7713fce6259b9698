"""Options, configuration files, and the checks before anything expensive starts."""
