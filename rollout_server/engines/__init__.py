"""The protocol of engines, its vLLM implementation, and the merge of adapters before a start."""
