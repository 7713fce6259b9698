"""OpenAI's routes by vLLM's own routers and handlers (OAI-01)."""

from argparse import ArgumentParser
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_server.engines.engine_protocol import ChatGenerate


@dataclass
class BalancedClient:
    """vLLM's `EngineClient` over the engines of all replicas.

    first: the engine whose renderer and configs vLLM's handlers use.
    generate_chat: chooses the engine that generates.
    """

    first: AsyncLLM
    generate_chat: ChatGenerate
    errored: ClassVar = False  # `generate` chooses a living engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: object
    ) -> AsyncGenerator[Any, None]:
        """Generate with the server's priority, adapter and request id; ignores other options."""
        n, max_tokens = sampling_params.n, sampling_params.max_tokens or 0
        tokens = len(prompt["prompt_token_ids"]) + n * max_tokens
        return self.generate_chat(prompt, sampling_params, tokens, n)


async def openai_app(llm: AsyncLLM, generate_chat: ChatGenerate) -> FastAPI:
    """Return an app with vLLM's chat and models routes, bound to the renderer of `llm`."""
    model = str(llm.model_config.served_model_name)
    parser: Any = ArgumentParser()  # the options of vLLM's own parser, with its defaults
    args = make_arg_parser(parser).parse_args(["--model", model])
    app = FastAPI(openapi_url=None)
    app.include_router(models_router)
    app.include_router(chat_router)
    init_exception_handler(app)
    app.state.args = args
    client: Any = BalancedClient(llm, generate_chat)
    await init_app_state(client, app.state, args, ("generate",))
    return app
