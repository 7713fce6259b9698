"""Answers `/infer/` calls with a pool of engine replicas."""
