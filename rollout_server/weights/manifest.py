"""Checks of a push against the names and shapes of the checkpoint's model (SYNC-05)."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from shared_contracts.errors import refusal
from shared_contracts.weights import (
    ADAPTER_KEY,
    AdapterMeta,
    DtypeName,
    ParameterMeta,
    unfused,
    wire_dtype,
)


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
    """Raise the `manifest-mismatch` problem unless every parameter comes once and as expected.

    expected: `checkpoint_parameters`. dtype: of the engines' weights.
    """
    sent = Counter((each.name, each.dtype, tuple(each.shape)) for each in parameters)
    wanted = Counter((name, wire_dtype(name, dtype), tuple(expected[name])) for name in expected)
    if not (wrong := [*(wanted - sent), *(sent - wanted)]):
        return
    name = wrong[0][0]
    forms = [
        " and ".join(f"{kind} {list(shape)}" for n, kind, shape in which.elements() if n == name)
        for which in (sent, wanted)
    ]
    count = len({each[0] for each in wrong})
    detail = (
        f"server: {count} parameter(s) do not fit the model, nothing was loaded; the first: {name} "
        f"is sent as {forms[0] or 'nothing'}, and the model has {forms[1] or 'no such parameter'}"
    )
    raise refusal("manifest-mismatch", detail, "parameters")


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


def write_adapter(root: Path, content: bytes, expected: Mapping[str, list[int]]) -> Path:
    """Write peft's two files of an adapter to a new folder below `root`; return the folder.

    expected: `checkpoint_parameters`. Raises the `adapter-refused` problem for content
    that is no valid adapter in safetensors format.
    """
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        meta = AdapterMeta.model_validate_json(header.pop("__metadata__")[ADAPTER_KEY])
        shapes = {name: entry["shape"] for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"the body is no safetensors with the metadata {ADAPTER_KEY!r} ({error})"
        raise refusal("adapter-refused", found, "body") from None
    check_adapter(shapes, meta, expected)
    folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=root))
    config = meta.model_dump() | {"peft_type": "LORA", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
