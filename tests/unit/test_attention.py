"""Attention within the segments of a packed row: as separate rows have it, and at what cost."""

import json
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3VLForConditionalGeneration

from learner.config import merge, parse_config
from learner.data.toy import ToyData
from learner.models.attention import Patches, attention_of, packed_attention, packed_bounds
from learner.models.load import LoadedModel
from learner.models.packed_forward import check_packing, packed_forward
from learner.models.packs import IMAGE, Pack
from learner.models.toy import ToyFamily, make_model
from learner.objectives.logit_stats import Supervision
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.fake_step import HostValues, put_on_fakes, step_model
from tests.unit.loaded_models import load_small
from tests.unit.packed_logits import packed_logits
from tests.unit.small_run import small_mapping
from tests.unit.tensor_shapes import Shapes, as_on_cuda
from tests.unit.toy_learner import ToyLearner

pytestmark = pytest.mark.req("FULL-01")

LORA = {"train_type": "lora", "lora_rank": 4, "lora_alpha": 8}
Load = Callable[..., LoadedModel]


@pytest.fixture
def load(toy_checkpoint: Path, toy_data: ToyData, tmp_path: Path) -> Load:
    return partial(load_small, toy_checkpoint, toy_data, tmp_path)


@pytest.fixture
def loaded(load: Load) -> LoadedModel:
    return load()


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Attention by a mask over the whole row."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3) * 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    "lengths", [[5], [7, 7, 7], [9, 10, 8], [3, 30, 1, 12]], ids=["one", "equal", "padded", "loop"]
)
def test_every_way_equals_the_mask_over_the_whole_row(lengths: list[int]) -> None:
    draw = torch.Generator().manual_seed(len(lengths))
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, generator=draw, requires_grad=True) for shape in shapes)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    bounds = packed_bounds(starts, max(lengths))
    found, _ = packed_attention(torch.nn.Module(), q, k, v, None, 0.5, **bounds)
    wanted = dense(q, k, v, lengths)
    assert torch.allclose(found, wanted, atol=1e-6)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("tuner", [{"train_type": "full"}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_no_tensor_has_the_length_of_the_row_twice(
    load: Load, samples: list[Sample], tuner: dict[str, object], again: bool
) -> None:
    learner = ToyLearner(load(model={"gradient_checkpointing": again}, tuner=tuner))
    pack = learner.pack(samples)
    shapes = Shapes()
    with shapes:
        learner.loss(pack).total.backward()
    assert not shapes.with_sides(len(pack), len(pack))
    assert shapes.with_sides(len(pack))
    model: Any = learner.model
    (model.base_model.model if tuner is LORA else model).set_attn_implementation("sdpa")
    dense = Shapes()
    with dense:
        learner.loss(pack).total.backward()
    assert dense.with_sides(len(pack), len(pack))


def test_a_forward_without_bounds_is_that_of_sdpa(
    loaded: LoadedModel, toy_checkpoint: Path, samples: list[Sample]
) -> None:
    """Generation with a cache and a padded batch, and one sequence alone."""
    plain: Any = Qwen3VLForConditionalGeneration.from_pretrained(
        toy_checkpoint, dtype=torch.float32
    )
    own: Any = loaded.model.eval()
    ids = torch.arange(40, 64).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for model in (own, plain):
        model.generation_config.eos_token_id = None
    ours, theirs = (
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for model in (own, plain)
    )
    assert torch.equal(ours, theirs)
    alone, wanted = (model(input_ids=ids[:1]).logits for model in (own, plain))
    assert torch.allclose(alone, wanted, atol=1e-5)


def test_on_cuda_one_call_of_each_layer_takes_all_images(load: Load, samples: list[Sample]) -> None:
    loaded = load()
    pack = ToyLearner(loaded).pack(samples)
    calls = Counter[tuple[int, ...]]()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func._schema.name == "torch_attn::_varlen_attn":
                calls[tuple(args[0].shape)[:2]] += 1
                return args[0], torch.empty(0), torch.empty(0)  # the CPU has no such kernel
            return func(*args, **(kwargs or {}))

    counting = Calls()  # type: ignore[no-untyped-call]
    with torch.no_grad(), counting, as_on_cuda():
        packed_logits(loaded.model, pack)
    config: Any = loaded.model.config
    text, vision = config.text_config, config.vision_config
    assert pack.pixel_values is not None
    assert calls == {
        (len(pack), text.num_attention_heads): text.num_hidden_layers,
        (len(pack.pixel_values), vision.num_heads): vision.depth,
    }


# --- What a GPU would be waited for: tensors of the device are fake, those of the host real


_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}


class Waits(HostValues):
    """Counts, by function, what asks for a value of the device: a number, or where a mask is true.

    mixed: operations between tensors of the device and of the host, which a GPU refuses.
    operations: all on tensors of the device.
    """

    def __init__(self, images: Tensor) -> None:
        super().__init__(images)
        self.asked: Counter[str] = Counter()
        self.mixed: set[str] = set()
        self.operations: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        on_device = [isinstance(each, FakeTensor) for each in tensors]
        if any(on_device):
            self.operations.add(func._schema.name)
            if func is _aten._local_scalar_dense.default or _searches(func, args):
                self.asked[_asking()] += 1
            here = [t for t, there in zip(tensors, on_device, strict=True) if not there]
            if any(each.ndim for each in here) and func not in _COPIES:
                self.mixed.add(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _searches(func: Any, args: Any) -> bool:
    """Whether how many elements a mask has decides the shape of what comes out."""
    if func in (_aten.nonzero.default, _aten.masked_select.default):
        return True
    if "index" not in str(func):
        return False
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)


def _asking() -> str:
    """The function whose value is asked for, nearest to the operation and outside of torch."""
    for frame, _ in traceback.walk_stack(None):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "_engine_run_backward":
            return "backward"
        if "/torch/" not in file and not file.endswith(("test_attention.py", "fake_step.py")):
            return name
    raise AssertionError("no function outside of torch")


def on_device(mode: FakeTensorMode, pack: Pack) -> Pack:
    """Do what `Pack.to` does; moved tensors are fake ones."""

    def moved(part: Supervision) -> Supervision:
        found = {f.name: getattr(part, f.name) for f in fields(part)}
        fakes = {k: mode.from_tensor(v) for k, v in found.items() if isinstance(v, Tensor)}
        return replace(part, **fakes)

    values: dict[str, Any] = {}
    there = pack.to(torch.device("meta"))
    for name, part in vars(there).items():
        own = getattr(pack, name)
        if isinstance(part, Tensor):
            values[name] = mode.from_tensor(own) if part.is_meta else own
        elif isinstance(part, Supervision):
            values[name] = moved(own)
        elif isinstance(part, Patches):
            values[name] = replace(
                own,
                rows={k: mode.from_tensor(row) for k, row in own.rows.items()},
                frames=replace(own.frames, bounds=mode.from_tensor(own.frames.bounds)),
                window_index=None if own.windows is None else mode.from_tensor(own.window_index),
                windows=own.windows
                and replace(own.windows, bounds=mode.from_tensor(own.windows.bounds)),
            )
    return replace(pack, **values)


@contextmanager
def counting_waits(pack: Pack) -> Iterator[tuple[FakeTensorMode, Waits]]:
    mode, waits = FakeTensorMode(allow_non_fake_inputs=True), Waits(pack.mm_token_types == IMAGE)
    with mode, waits, as_on_cuda():
        yield mode, waits


def deep(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint's files with twice as many layers, without weights."""
    shutil.copytree(checkpoint, folder)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["num_hidden_layers"] *= 2
    described["vision_config"]["depth"] *= 2
    described["text_config"].pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(
    ("family", "choice", "again"),
    [
        ("qwen3_vl", "sdpa", False),
        *((family, "auto", True) for family in get_args(ToyFamily) if family != "qwen3_5"),
    ],
)
def test_a_gpu_is_waited_for_as_often_whatever_the_depth(
    toy_data: ToyData,
    tmp_path: Path,
    samples: list[Sample],
    family: ToyFamily,
    again: bool,
    choice: str,
) -> None:
    """Twice for each deepstack level forward and three times backward, and for a check of sizes."""
    make_model(tmp_path / "model", seed=0, family=family)

    def waits(checkpoint: Path) -> Waits:
        model = {"gradient_checkpointing": again, "attn_implementation": choice}
        config = parse_config(
            merge(small_mapping(checkpoint, toy_data, tmp_path / "run"), {"model": model})
        )
        loaded = step_model(config)
        pack = ToyLearner(loaded).pack(samples)
        assert pack.image_grid_thw is not None
        assert len(pack.image_grid_thw) > 2
        with counting_waits(pack) as (mode, found):
            put_on_fakes(loaded.model)
            there = on_device(mode, pack)
            some = packed_forward(loaded.model, there, lambda x: x.head(x.hidden[-3:]))
            some.sum().backward()
        return found

    found = waits(tmp_path / "model")
    of_levels = {"_deepstack_process": 2, "backward": 3} if "qwen3_vl" in family else {}
    assert found.asked == {"torch_compilable_check": 1, **of_levels}
    # The fakes make masks on the host: those of `sdpa`, of the gated delta rule and of experts.
    assert choice == "sdpa" or found.mixed <= {"aten.masked_fill.Scalar", "aten.index_put_.default"}
    # transformers looks for segments in the positions, and waits, but not for fake tensors.
    if family in ("qwen3_vl", "qwen2_5_vl"):  # others have sums of their own
        assert ("aten::cumsum" in found.operations) == (choice == "sdpa")
    assert waits(deep(tmp_path / "model", tmp_path / "deep")).asked == found.asked


@pytest.mark.req("PACK-04")
def test_images_whose_bounds_are_wrong_are_noticed(loaded: LoadedModel) -> None:
    tower: Any = loaded.inner.visual

    def lose(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        bounds = kwargs["patch_bounds"]
        return args, {**kwargs, "patch_bounds": bounds[[0, -1]], "longest_image": int(bounds[-1])}

    check_packing(loaded.model)
    for block in tower.blocks:
        block.register_forward_pre_hook(lose, with_kwargs=True)
    with pytest.raises(ContractError, match=r"training\.packing"):
        check_packing(loaded.model)


@pytest.mark.parametrize("choice", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_that_is_not_installed_is_refused_before_the_model_is_read(
    load: Load, choice: str
) -> None:
    with pytest.raises(ContractError, match=rf"attn_implementation: {choice} is not installed"):
        attention_of(choice)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=rf"attn_implementation: {choice} is not installed"):
        load(model={"attn_implementation": choice})
