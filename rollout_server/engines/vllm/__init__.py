"""The vLLM engine: what imports vLLM, in this process and in its workers.

Here is what stands before that: the environment variables that are set for vLLM, each with its
reason.
"""

import os

from rollout_server.engines.engine_protocol import Engine
from rollout_server.runtime.logs import JSON_LOGGING_FILE
from rollout_server.settings.options import ServerSettings
from rollout_server.settings.repeat_config import repeat_environment
from shared_contracts.machine import CUDA_VISIBLE, visible_gpus


def environment(settings: ServerSettings) -> dict[str, str]:
    """The variables vLLM and its libraries must find before they are imported."""
    variables = {
        # A checkpoint is a local directory: nothing is ever looked up on a hub.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # No usage reports.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Our weight transfer and nothing else that happens to be installed.
        "VLLM_PLUGINS": "rollmatch_weight_transfer",
        # The server has threads by the time it starts an engine: forking would be unsafe.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Processes talk to each other without pickle, which would run whatever it is sent.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        # The bounds of `/infer/`, for OpenAI's routes.
        "VLLM_MAX_N_SEQUENCES": str(settings.max_requests_per_call),
        "VLLM_MAX_IMAGE_PIXELS": str(int(settings.max_image_megapixels * 10**6)),
        # stdout belongs to whoever started the server.
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": settings.log_level.upper(),
        # Prompts are tokenized in threads of one process; the Rust pool would warn on spawn.
        "TOKENIZERS_PARALLELISM": "false",
    }
    # The engine's process reads the guard's settings. The guard is a logits processor of the model
    # runner V1; without the guard vLLM chooses the runner.
    variables |= repeat_environment(settings.repeat_terminate)
    if settings.log_format == "json":  # vLLM sets up logging by itself, here and in each engine
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(JSON_LOGGING_FILE)
    if settings.distributed_executor_backend != "ray":  # workers listen for this machine alone
        variables |= dict.fromkeys(("VLLM_HOST_IP", "VLLM_LOOPBACK_IP"), "127.0.0.1")
    return variables | (_cpu(settings) if settings.device == "cpu" else _gpu(settings))


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


def _gpu(settings: ServerSettings) -> dict[str, str]:
    if CUDA_VISIBLE not in os.environ or settings.distributed_executor_backend == "ray":
        return {}
    visible = visible_gpus(os.environ)
    if not visible:  # of a machine whose driver does not tell its GPUs
        return {}
    return {
        # CUDA takes the beginning of a UUID and blanks between names; vLLM takes ids and whole
        # UUIDs. Ids mean the same to both: `run_program` sets CUDA_DEVICE_ORDER, and
        # `check_gpus` refuses other names than those of the first GPUs in their order.
        CUDA_VISIBLE: ",".join(map(str, visible)),
    }


def build(settings: ServerSettings, index: int) -> Engine:
    """Start replica `index`: its process, and the model in it (seconds)."""
    from rollout_server.engines.vllm.engine import VllmEngine  # it imports vLLM

    return VllmEngine.build(settings, index)
