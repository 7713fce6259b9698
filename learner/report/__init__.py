"""The page that shows a run: curves, timelines, and a gallery of answers."""
