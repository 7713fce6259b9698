"""Weight updates: their states, the weight group, and which updates are admitted."""
