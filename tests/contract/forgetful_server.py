"""A rollout server whose engines keep what old weights cached; all else of it is real.

python -m tests.contract.forgetful_server serve ...
"""

from typing import TYPE_CHECKING
from unittest.mock import patch

from rollout_server.cli import main
from rollout_server.serving.pool import Pool

if TYPE_CHECKING:
    from rollout_server.engines.vllm.engine import VllmEngine


class ForgetfulPool(Pool):
    """Its engines leave their caches alone when weights change."""

    def _build_engine(self, index: int) -> "VllmEngine":
        from rollout_server.engines.vllm.engine import VllmEngine

        class Forgetful(VllmEngine):
            async def pause(self) -> None:
                await self._llm.pause_generation(mode="wait", clear_cache=False)

            async def publish(self, version: int) -> None:
                await self._llm.update_weight_version(str(version))
                self.weights_version = version

        return Forgetful.build(self.settings, index)


if __name__ == "__main__":
    with patch("rollout_server.serve.Pool", ForgetfulPool):
        main()
