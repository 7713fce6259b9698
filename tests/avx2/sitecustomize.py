"""Has torch and vLLM take this processor for one that has AVX2 and nothing newer.

    PYTHONPATH=tests/avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 make test

The two variables hold torch's own kernels and oneDNN's down. vLLM chooses its library by what
`torch.cpu` says of the processor, and no variable changes that: so it says less here.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NEWER = ("avx512", "avx10", "amx")


class _LessThanItIs(MetaPathFinder):
    """Changes `torch.cpu` where it is imported; before that, nothing of torch is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def changed(module: Any) -> None:
            run(module)
            real = module.get_capabilities()
            less = {key: False if key.startswith(_NEWER) else value for key, value in real.items()}
            module.get_capabilities = lambda: less

        loader.exec_module = changed
        return spec


sys.meta_path.insert(0, _LessThanItIs())
