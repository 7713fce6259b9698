"""The rollout server: FastAPI over vLLM.

Never imports `learner`; only `engine`, the weight engines and what runs in workers import vLLM.
"""
