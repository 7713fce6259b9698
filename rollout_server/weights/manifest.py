"""Checks of a push against the names and shapes of the checkpoint's model (SYNC-05)."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from rollout_server.runtime.refusals import refusal
from shared_contracts.errors import Problem, ProblemError
from shared_contracts.weights import AdapterMeta, DtypeName, ParameterMeta, unfused, wire_dtype

# Largest number of faults that a refusal lists.
MOST_LISTED = 32


@cache
def checkpoint_parameters(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each parameter of a checkpoint's model, by name; takes a second.

    The names are those of transformers' model, not of the files: a tied parameter has one name, and
    fused experts are split.
    """
    import torch  # slow
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return {
        name: shape
        for fused, parameter in model.named_parameters()
        for name, shape in unfused(fused, parameter.shape)
    }


def check_manifest(
    parameters: Sequence[ParameterMeta], expected: Mapping[str, list[int]], dtype: DtypeName
) -> None:
    """Raise the `manifest-mismatch` problem with all faults, if there are any.

    expected: `checkpoint_parameters`. dtype: of the engines' weights.
    """
    times = Counter(parameter.name for parameter in parameters)
    faults = [(name, "missing", f"{shape}") for name, shape in expected.items() if not times[name]]
    faults += [(name, "duplicate", f"{many} times") for name, many in times.items() if many > 1]
    for parameter in parameters:
        shape = expected.get(parameter.name)
        if shape is None:
            faults.append((parameter.name, "unexpected", "the model has no such parameter"))
        elif shape != parameter.shape:
            faults.append((parameter.name, "shape", f"{parameter.shape}, not {shape}"))
        elif parameter.dtype != (wanted := wire_dtype(parameter.name, dtype)):
            faults.append((parameter.name, "dtype", f"{parameter.dtype}, not {wanted}"))
    if not faults:
        return
    name, kind, detail = faults[0]
    errors = [
        {"where": where, "fault": fault, "detail": found}
        for where, fault, found in faults[:MOST_LISTED]
    ]
    text = (
        f"server: {len(faults)} fault(s), nothing was loaded and the weights have not changed; "
        f"the first: {name} ({kind}): {detail}"
    )
    raise ProblemError(Problem.of("manifest-mismatch", text, "parameters", errors))


_PEFT = "base_model.model."
_HALF = re.compile(r"\.lora_(A\.weight|B\.weight|magnitude_vector)$")


def check_adapter(
    shapes: Mapping[str, list[int]], meta: AdapterMeta, expected: Mapping[str, list[int]]
) -> None:
    """Raise the `adapter-refused` problem unless names and shapes are complete and correct.

    vLLM itself ignores unknown names and loads tensors that are too small.

    shapes: by peft's names. expected: `checkpoint_parameters`.
    """
    wanted: dict[str, list[int]] = {}
    for layer in {_HALF.sub("", name) for name in shapes}:
        matrix = expected.get(f"{layer.removeprefix(_PEFT)}.weight", [])
        if len(matrix) == 2:
            wanted |= {
                f"{layer}.lora_A.weight": [meta.r, matrix[1]],
                f"{layer}.lora_B.weight": [matrix[0], meta.r],
            }
            if meta.use_dora:
                wanted[f"{layer}.lora_magnitude_vector"] = matrix[:1]
    names = sorted(shapes.keys() | wanted.keys())
    if wrong := [name for name in names if shapes.get(name) != wanted.get(name)]:
        found = f"{wrong[0]} is {shapes.get(wrong[0], 'missing')}"
        must = wanted.get(wrong[0], "a name of this model")
        detail = (
            f"server: {len(wrong)} fault(s), nothing was loaded; the first: {found}, not {must}"
        )
        raise refusal("adapter-refused", detail, "adapter")
