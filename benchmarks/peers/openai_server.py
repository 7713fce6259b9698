"""vLLM's own OpenAI server, started through Python: its command line needs the GPU build.

python -m benchmarks.peers.openai_server CHECKPOINT PORT
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.processes import end_with_benchmark
from benchmarks.workload import engine_settings


def server_args(checkpoint: Path, port: str) -> Any:
    """vLLM's defaults, with every engine argument as our own server sets it."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rollout_server.engines.vllm.arguments import engine_args

    options = ["--host", "127.0.0.1", "--port", port, "--disable-uvicorn-access-log"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    ours = engine_args(engine_settings(checkpoint), 0)
    for field in fields(ours):
        setattr(args, field.name, getattr(ours, field.name))
    args.disable_log_stats = True  # as our server and the in-process engine have it
    return args


def main() -> None:
    end_with_benchmark()
    checkpoint, port = Path(sys.argv[1]), sys.argv[2]
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server

    uvloop.run(run_server(server_args(checkpoint, port)))


if __name__ == "__main__":
    main()
