"""The pages of a run (`run_page`) and of an evaluation (`evaluation_page`). Imports no torch."""
