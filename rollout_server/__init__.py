"""The rollout server: FastAPI over vLLM.

Never imports `learner`. vLLM is imported by `engine` with `engine_args` and `guard_check`, by the
weight engines, and by what runs in workers.
"""
