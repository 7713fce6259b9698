"""The rollout server: FastAPI over vLLM.

Never imports `learner`; only `engine` and `weight_engine_gloo` import vLLM.
"""
