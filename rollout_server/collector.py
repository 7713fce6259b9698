"""Parameters that a worker receives beside its model: an adapter's, or those of a trial.

Collector    stands in for the model while a transfer engine loads
Collected    what came, and its digests
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from rollout_server.coverage import Box
from rollout_server.placement import Placement, Plan, Target
from rollout_server.readback import Asked, subtotals
from rollout_server.verification import RawPart
from shared_contracts.digests import matrix_shape
from shared_contracts.weights import ParameterMeta


class Collector(nn.Module):
    """Takes what a transfer engine would load into the model.

    tensors: what came, by name, on the CPU and in memory of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name] = tensor.detach().to("cpu", copy=True)  # buckets are used again


@dataclass
class Collected:
    """Parameters that come, or came, beside the model."""

    parameters: Sequence[ParameterMeta]
    collector: Collector = field(default_factory=Collector, kw_only=True)

    def subtotals(self, asked: Sequence[tuple[str, Sequence[int] | None]]) -> list[list[RawPart]]:
        """Of what came, each parameter as one part (`readback.subtotals`)."""
        by_name = {parameter.name: parameter for parameter in self.parameters}
        held, plan = nn.Module(), Plan()
        for index, (name, tensor) in enumerate(self.collector.tensors.items()):
            held.register_parameter(str(index), nn.Parameter(tensor, requires_grad=False))
            rows, columns = matrix_shape(tensor.shape)
            box = Box(0, 0, rows, columns)
            target = Target("", str(index), rows, columns)
            plan.placements[name].append(Placement(box, target, box))
        return subtotals(held, plan, [Asked(by_name[n], c) for n, c in asked], on_cpu=True)
