"""The rollout server: FastAPI over vLLM.

Never imports `learner`. vLLM is imported in `engines/vllm` alone.
"""
