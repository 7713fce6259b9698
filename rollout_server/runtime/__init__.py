"""What every room uses: refusals, logs, deadlines, temporary files, child processes."""
