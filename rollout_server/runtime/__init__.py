"""What every room uses: refusals, logs, clocks, temporary files, child processes."""
