"""A payload over the processes of a run."""

from functools import partial

import torch
import torch.distributed as dist

from learner.metrics.payload import Array, Payload


def over_processes(payload: Payload, device: torch.device) -> Payload:
    """The payload of all processes, the same in each of them (MET-01).

    Every process must call it, once a step, whatever it has counted: one sum and one maximum of
    vectors whose length the declaration alone decides. In a run of one process it changes nothing.

    device: where the process group can combine tensors; that of the model.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return payload

    def all_reduce(values: Array, op: dist.ReduceOp.RedOpType) -> Array:
        tensor = torch.tensor(values, device=device)
        dist.all_reduce(tensor, op)
        combined: Array = tensor.cpu().numpy()
        return combined

    return payload.reduced(
        partial(all_reduce, op=dist.ReduceOp.SUM), partial(all_reduce, op=dist.ReduceOp.MAX)
    )
