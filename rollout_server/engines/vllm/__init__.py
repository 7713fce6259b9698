"""The vLLM engine; only this package imports vLLM.

This module imports no vLLM: it has the environment variables for vLLM, each with its reason.
"""

from rollout_server.engines.engine_protocol import Engine
from rollout_server.runtime.logs import JSON_LOGGING_FILE
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import repeat_environment
from shared_contracts.machine import CUDA_VISIBLE


def environment(settings: ServerSettings) -> dict[str, str]:
    """Return the variables that must be set before vLLM is imported."""
    variables = {
        # A checkpoint is a local directory: no hub is used.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # No usage reports.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Our weight transfer, and no other installed plug-in.
        "VLLM_PLUGINS": "rollmatch_weight_transfer",
        # The server has threads when it starts an engine: a fork would be unsafe.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # No pickle between processes, as it can execute code.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        # The bounds of `/infer/`, for OpenAI's routes.
        "VLLM_MAX_N_SEQUENCES": str(settings.max_requests_per_call),
        "VLLM_MAX_IMAGE_PIXELS": str(int(settings.max_image_megapixels * 10**6)),
        # Logs go to stderr.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": settings.log_level.upper(),
        # Prompts are tokenized in threads of one process; the Rust pool would warn on spawn.
        "TOKENIZERS_PARALLELISM": "false",
    }
    # The guard is a logits processor of the model runner V1; without it, vLLM chooses the runner.
    variables |= repeat_environment(settings.repeat_terminate)
    if settings.log_format == "json":  # vLLM sets up logging itself, here and in each engine
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(JSON_LOGGING_FILE)
    if settings.distributed_executor_backend != "ray":  # workers listen on the loopback only
        variables |= dict.fromkeys(("VLLM_HOST_IP", "VLLM_LOOPBACK_IP"), "127.0.0.1")
    if settings.device == "cpu":
        variables |= _cpu(settings)
    elif settings.distributed_executor_backend != "ray":
        # vLLM's ids are indices into this list; `check_gpus` has compared them with the machine's.
        variables[CUDA_VISIBLE] = ",".join(map(str, range(max(settings.gpus) + 1)))
    return variables


def _cpu(settings: ServerSettings) -> dict[str, str]:
    # What torch compiles on a CPU, as for log-probabilities, needs a C++ compiler, and the engine
    # dies without one.
    eager = {"TORCH_COMPILE_DISABLE": "1"}
    if settings.tensor_parallel_size > 1:
        return eager  # vLLM binds each worker's threads to a NUMA node
    return eager | {
        # Otherwise vLLM replaces the executor `uni` on the CPU and starts one more process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # One thread per engine: with `uni` a step of a small model takes 20 ms with it and
        # 100 ms with one thread per core, and replicas must not fight for the cores.
        "OMP_NUM_THREADS": "1",
        # Each new shape of a batch adds a kernel to oneDNN's cache: the default of 1024 lets
        # the engine's memory grow for thousands of calls.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }


def build(settings: ServerSettings, index: int) -> Engine:
    """Start the process of replica `index`, and load the model (seconds)."""
    from rollout_server.engines.vllm.engine import VllmEngine  # imports vLLM

    return VllmEngine.build(settings, index)
