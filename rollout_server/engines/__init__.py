"""The engine behind `engine_protocol`, and what stands before it."""
