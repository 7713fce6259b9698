"""An evaluation from a config to a folder of artifacts."""
