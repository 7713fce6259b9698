"""What the live view of a run shows."""
