"""Starting, watching and stopping the processes a run is made of."""
