"""Channel A's forwards on the real architecture: what goes in, and what is fed back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from learner.config.schema import CoordContextMode, SoftContextGradMode
from learner.models.load import LoadedModel
from learner.models.packs import Pack
from learner.models.self_context import SelfContext, context_embeddings
from learner.objectives.logit_stats import ForwardStats
from learner.stages.coords import COORD_BINS
from learner.types import Sample
from tests.unit.loaded_models import loaded_from
from tests.unit.mixed_samples import mixed_samples
from tests.unit.packed_logits import as_given, logits_through, packed_logits
from tests.unit.toy_learner import (
    COORDINATES,
    EVERY_TERM,
    TEXT,
    Forward,
    ToyLearner,
    forwards_of,
    sharpened,
    stated_arguments,
)

MODES: tuple[CoordContextMode, ...] = get_args(CoordContextMode)
GRAD_MODES: tuple[SoftContextGradMode, ...] = get_args(SoftContextGradMode)


@pytest.fixture(scope="module")
def loaded(toy_checkpoint: Path) -> LoadedModel:
    return sharpened(loaded_from(toy_checkpoint), 8)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return mixed_samples(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def pack(loaded: LoadedModel, samples: list[Sample]) -> Pack:
    return ToyLearner(loaded).pack(samples)


@torch.no_grad()
def forwards(loaded: LoadedModel, pack: Pack, context: SelfContext) -> list[Forward]:
    learner = ToyLearner(loaded, context)
    with forwards_of(learner.model) as seen:
        learner.loss(pack)
    return seen


def embedded(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """By the model's own module; under test is who else calls it."""
    found: Tensor = loaded.inner.get_input_embeddings()(ids).detach()
    return found


def slots(pack: Pack) -> Tensor:
    return pack.supervision.coord_positions


def expected_embeddings(loaded: LoadedModel, pack: Pack, logits: Tensor) -> Tensor:
    """The mean embedding at each slot under the logits of the token before; (K, hidden)."""
    table = embedded(loaded, torch.tensor(loaded.vocab.ids)).double()
    means = []
    for position in slots(pack).tolist():
        values = logits[position - 1, loaded.vocab.ids].double()
        weights = (values - values.max()).exp()
        means.append((weights[:, None] * table).sum(0) / weights.sum())
    return torch.stack(means)


# --- the function


def test_the_distributions_of_these_tests_are_neither_flat_nor_certain(
    loaded: LoadedModel, pack: Pack
) -> None:
    (first,) = forwards(loaded, pack, SelfContext())
    chosen = first.logits[slots(pack) - 1][:, loaded.vocab.ids]
    peaks = chosen.softmax(-1).amax(-1)
    assert peaks.min() > 3 / COORD_BINS
    assert peaks.max() < 0.99


def extreme_logits() -> Tensor:
    rows = 3 * torch.randn(6, COORD_BINS, generator=torch.Generator().manual_seed(0))
    rows[1] = 0.0
    rows[2] *= 1e4
    rows[3, ::2] = -torch.inf
    rows[4, 17] = torch.inf
    rows[5] = torch.nan
    return rows


@pytest.mark.req("CHA-01")
def test_the_mean_embedding_is_the_expectation() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(5, COORD_BINS, generator=generator)
    table = torch.randn(COORD_BINS, 8, generator=generator)
    found = context_embeddings(logits, table, "soft")
    for row, mean in zip(logits.double(), found, strict=True):
        total = sum(value.exp().item() for value in row)
        wanted = torch.zeros(8, dtype=torch.float64)
        for value, entry in zip(row, table.double(), strict=True):
            wanted += value.exp() / total * entry
        assert torch.allclose(mean.double(), wanted, atol=1e-6)


@pytest.mark.req("CHA-01")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_straight_through_is_the_likeliest_bin_to_the_bit(dtype: torch.dtype) -> None:
    logits = extreme_logits()
    table = torch.randn(COORD_BINS, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    hard, st = (context_embeddings(logits, table, mode) for mode in ("hard", "st"))
    likeliest = [
        max(range(COORD_BINS), key=row.__getitem__) for row in logits[[0, 1, 3, 4]].tolist()
    ]
    assert torch.equal(hard[[0, 1, 3, 4]], table[likeliest])
    assert torch.equal(st.to(dtype), hard)


@pytest.mark.req("CHA-01")
def test_straight_through_has_the_gradients_of_the_mean() -> None:
    table = torch.randn(COORD_BINS, 8, generator=torch.Generator().manual_seed(3))
    upstream = torch.randn(6, 8, generator=torch.Generator().manual_seed(4))

    def gradients(mode: CoordContextMode) -> tuple[Tensor, ...]:
        inputs = (extreme_logits().requires_grad_(), table.clone().requires_grad_())
        return torch.autograd.grad(context_embeddings(*inputs, mode), inputs, upstream)

    for st, soft in zip(gradients("st"), gradients("soft"), strict=True):
        assert torch.isfinite(st).all()
        assert st.abs().sum() > 0
        assert torch.equal(st, soft)


# --- how often, and with what


@pytest.mark.req("CHA-01", "LOSS-03")
@pytest.mark.scenario("n_softctx_iter=2 runs exactly two forwards and uses final logits")
@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_every_pack_has_exactly_as_many_forwards_as_iterations(
    loaded: LoadedModel, samples: list[Sample], mode: CoordContextMode, grad_mode: Any
) -> None:
    small = ToyLearner(loaded).pack(samples[2:3])
    for iterations in (1, 2, 3, 4):
        seen = forwards(loaded, small, SelfContext(iterations, mode, grad_mode))
        assert len(seen) == iterations


@pytest.mark.req("CHA-02", "PACK-04")
@pytest.mark.scenario("Multimodal forward does not fail under iterative inputs_embeds")
@pytest.mark.parametrize("mode", MODES)
def test_what_reaches_the_model_is_the_same_in_every_iteration_but_the_embeddings(
    loaded: LoadedModel, pack: Pack, mode: CoordContextMode
) -> None:
    first, *later = forwards(loaded, pack, SelfContext(3, mode))
    assert pack.pixel_values is not None
    assert pack.image_grid_thw is not None
    assert torch.equal(first.arguments["input_ids"], pack.input_ids)
    for seen in (first, *later):
        given = {name: value for name, value in seen.arguments.items() if value is not None}
        assert given.keys() <= stated_arguments()
        assert given.keys() == {
            "input_ids" if seen is first else "inputs_embeds",
            "position_ids",
            "mm_token_type_ids",
            "pixel_values",
            "image_grid_thw",
            "cu_seq_lens_q",
            "cu_seq_lens_k",
            "max_length_q",
            "max_length_k",
            "use_cache",
        }
        assert given["use_cache"] is False
        assert given["position_ids"].shape == (4, 1, len(pack))
        assert torch.equal(given["position_ids"], pack.position_ids)
        assert torch.equal(pack.pixel_values, given["pixel_values"])
        assert torch.equal(pack.image_grid_thw, given["image_grid_thw"])
        assert torch.equal(given["mm_token_type_ids"], pack.mm_token_types)
        assert seen.logits.shape[0] == len(pack)


@pytest.mark.req("CHA-02")
def test_a_pack_without_images_or_without_slots_iterates_all_the_same(
    loaded: LoadedModel, samples: list[Sample]
) -> None:
    learner = ToyLearner(loaded, SelfContext(3, "soft"))
    for chosen, images, coordinates in ((samples[2:3], 0, 4), (samples[3:], 1, 0)):
        alone = learner.pack(chosen)
        with forwards_of(learner.model) as seen:
            loss = learner.loss(alone)
        assert len(slots(alone)) == coordinates
        assert [f.arguments["pixel_values"] is not None for f in seen] == [images == 1] * 3
        gradients = learner.gradients(loss)
        assert all(torch.isfinite(g).all() for g in gradients.values())
        assert any(g.abs().sum() > 0 for g in gradients.values())


# --- what is fed back


@pytest.mark.req("CHA-02")
@pytest.mark.scenario("Multimodal forward does not fail under iterative inputs_embeds")
@pytest.mark.parametrize("mode", MODES)
def test_only_coordinate_slots_differ_from_the_embedded_ids_to_the_bit(
    loaded: LoadedModel, pack: Pack, mode: CoordContextMode
) -> None:
    base = embedded(loaded, pack.input_ids)[0]
    is_slot = torch.zeros(len(pack), dtype=torch.bool)
    is_slot[slots(pack)] = True
    is_image = pack.mm_token_types[0] == 1
    assert is_image.sum() == 16 + 24 + 6 + 24
    for seen in forwards(loaded, pack, SelfContext(4, mode))[1:]:
        (row,) = seen.arguments["inputs_embeds"]
        assert torch.equal(row[~is_slot], base[~is_slot])
        assert torch.equal(row[is_image], base[is_image])
        assert (row[is_slot] != base[is_slot]).any(dim=-1).all()


@pytest.mark.req("CHA-01")
def test_a_slot_reads_what_the_forward_before_expected_there(
    loaded: LoadedModel, pack: Pack
) -> None:
    seen = forwards(loaded, pack, SelfContext(4, "soft"))
    fed_back = [f.arguments["inputs_embeds"][0, slots(pack)] for f in seen[1:]]
    for before, context in zip(seen, fed_back, strict=False):
        wanted = expected_embeddings(loaded, pack, before.logits)
        assert torch.allclose(context.double(), wanted, atol=1e-5)
    assert not torch.allclose(fed_back[0], fed_back[1], atol=1e-4)


@pytest.mark.req("CHA-01")
def test_straight_through_and_the_likeliest_bin_run_the_same_forwards(
    loaded: LoadedModel, pack: Pack
) -> None:
    hard, st = (forwards(loaded, pack, SelfContext(3, mode)) for mode in ("hard", "st"))
    for a, b in zip(hard, st, strict=True):
        assert torch.equal(a.logits, b.logits)
    likeliest = hard[1].logits[slots(pack) - 1][:, loaded.vocab.ids].argmax(-1)
    said = embedded(loaded, torch.tensor(loaded.vocab.ids)[likeliest])
    assert torch.equal(hard[2].arguments["inputs_embeds"][0, slots(pack)], said)


@contextmanager
def changed_rows(model: nn.Module, call: int, rows: list[int], ids: list[int]) -> Iterator[None]:
    """The logits of these rows and ids turned round in one call of the model."""
    calls = 0

    def turn(logits: Tensor) -> Tensor:
        nonlocal calls
        if calls == call:
            at = torch.tensor(rows)[:, None], torch.tensor(ids)
            logits = logits.clone()
            logits[0][at] = -logits[0][at]
        calls += 1
        return logits

    with logits_through(model, turn):
        yield
    assert calls > call


@pytest.mark.req("CHA-01")
def test_the_slot_at_a_position_reads_the_logits_of_the_position_before(
    loaded: LoadedModel, samples: list[Sample]
) -> None:
    small = ToyLearner(loaded).pack(samples[1:3])
    context = SelfContext(2, "soft")

    def fed_back() -> Any:
        return forwards(loaded, small, context)[1].arguments["inputs_embeds"][0]

    plain = fed_back()
    for position in slots(small)[[0, 3, 6]].tolist():
        for row, moved in ((position - 1, [position]), (position, [])):
            with changed_rows(loaded.model, 0, [row], loaded.vocab.ids):
                different = (fed_back() != plain).any(dim=-1)
            assert different.nonzero().flatten().tolist() == moved


@pytest.mark.req("CHA-02")
def test_every_iteration_embeds_the_ids_afresh(loaded: LoadedModel, pack: Pack) -> None:
    context = SelfContext(4, "hard")
    plain = forwards(loaded, pack, context)
    embedded_ids = []

    def spoil(_: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["inputs_embeds"] is not None:
            kwargs["inputs_embeds"].fill_(torch.nan)

    def note(_: nn.Module, args: tuple[Tensor], __: Tensor) -> None:
        embedded_ids.append(args[0])

    hooks = [
        loaded.model.register_forward_hook(spoil, with_kwargs=True),
        loaded.inner.get_input_embeddings().register_forward_hook(note),
    ]
    try:
        again = forwards(loaded, pack, context)
    finally:
        for hook in hooks:
            hook.remove()
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a.logits, b.logits)
    assert sum(torch.equal(ids, pack.input_ids) for ids in embedded_ids) == 4


@pytest.mark.req("CHA-02")
def test_hooks_of_the_embedding_reach_the_ids_and_the_context(
    loaded: LoadedModel, pack: Pack
) -> None:
    plain = embedded(loaded, pack.input_ids)[0]
    module = loaded.inner.get_input_embeddings()
    hook = module.register_forward_hook(lambda _, __, output: output + 0.125)
    try:
        first, second = forwards(loaded, pack, SelfContext(2, "soft"))
        wanted = expected_embeddings(loaded, pack, first.logits)
    finally:
        hook.remove()
    (row,) = second.arguments["inputs_embeds"]
    others = torch.ones(len(pack), dtype=torch.bool)
    others[slots(pack)] = False
    assert torch.equal(row[others], plain[others] + 0.125)
    assert torch.allclose(row[slots(pack)].double(), wanted, atol=1e-5)
    unmarked = expected_embeddings(loaded, pack, first.logits)
    assert torch.allclose(wanted, unmarked + 0.125, atol=1e-5)


@pytest.mark.req("CHA-02")
@pytest.mark.parametrize("mode", MODES)
def test_what_the_model_sees_is_in_every_iteration(
    loaded: LoadedModel, samples: list[Sample], mode: CoordContextMode
) -> None:
    """Rows between an image and the first slot cannot learn of it from what is fed back."""
    alone = ToyLearner(loaded).pack(samples[1:2])
    assert alone.pixel_values is not None
    between = slice(int(alone.mm_token_types[0].nonzero()[-1]) + 1, int(slots(alone)[0]))
    other = replace(alone, pixel_values=-alone.pixel_values)
    context = SelfContext(3, mode)
    as_it_is, turned = (forwards(loaded, chosen, context) for chosen in (alone, other))
    for a, b in zip(as_it_is, turned, strict=True):
        assert torch.allclose(a.logits[between], as_it_is[0].logits[between], atol=1e-5)
        assert (a.logits[between] - b.logits[between]).abs().amax(-1).min() > 1e-2


# --- what is recorded, and what the objectives look at


@pytest.mark.req("CHA-01")
@pytest.mark.parametrize(
    ("grad_mode", "recorded"),
    [("unroll", [True, True, True, True]), ("em_detach", [True, False, False, True])],
)
def test_detached_iterations_between_the_first_and_the_last_record_no_graph(
    loaded: LoadedModel, samples: list[Sample], grad_mode: SoftContextGradMode, recorded: list[bool]
) -> None:
    learner = ToyLearner(loaded, SelfContext(4, "soft", grad_mode))
    with forwards_of(learner.model) as seen:
        learner.loss(learner.pack(samples[2:3]))
    assert [forward.recorded for forward in seen] == recorded


A1 = {"loss/A1_text/struct_ce", "loss/A1_text/desc_ce"}
AT_SLOTS = {
    f"loss/A2_coord/{name}"
    for name in ("bbox_smoothl1", "bbox_ciou", "coord_ce", "coord_soft_ce", "coord_w1")
}
AT_TEXT = {"loss/A2_text/struct_ce", "loss/A2_coord/text_gate"}
GATE = {"loss/A2_coord/coord_gate"}


@pytest.mark.req("CHA-01", "LOSS-05", "LOSS-03")
@pytest.mark.scenario("n_softctx_iter=2 runs exactly two forwards and uses final logits")
@torch.no_grad()
def test_text_is_anchored_in_the_first_forward_and_all_else_in_the_last(
    loaded: LoadedModel, samples: list[Sample]
) -> None:
    learner = ToyLearner(loaded, SelfContext(3, "soft"), EVERY_TERM)
    small = learner.pack(samples[1:3])
    plain = learner.loss(small).atoms
    bins = loaded.vocab.ids
    vocabulary = forwards(loaded, small, SelfContext())[0].logits.shape[-1]
    words = sorted(set(range(vocabulary)) - set(bins))
    text = learner.pipeline.select(small.supervision, "A").text_rows.tolist()
    before_slots = (slots(small) - 1).tolist()

    def moved(call: int, rows: list[int], ids: list[int]) -> set[str]:
        """Atoms that change with these logits of that forward."""
        with changed_rows(loaded.model, call, rows, ids):
            changed = learner.loss(small).atoms
        return {name for name in plain if changed[name] != plain[name]}

    assert plain.keys() == A1 | AT_SLOTS | AT_TEXT | GATE
    assert moved(0, text, words) == A1
    assert moved(0, before_slots, words) == set()
    assert moved(0, before_slots, bins) == AT_SLOTS | AT_TEXT | GATE
    assert moved(1, text, words) == set()
    assert moved(1, before_slots, bins) == AT_SLOTS | AT_TEXT | GATE
    assert moved(2, text, words) == AT_TEXT
    assert moved(2, before_slots, words) == GATE
    assert moved(2, before_slots, bins) == AT_SLOTS | GATE


@pytest.mark.req("CHA-01")
@pytest.mark.parametrize(
    "modules", [TEXT, COORDINATES, EVERY_TERM], ids=["text", "coordinates", "all"]
)
def test_one_iteration_is_plain_teacher_forcing(
    loaded: LoadedModel, samples: list[Sample], modules: Any
) -> None:
    learner = ToyLearner(loaded, SelfContext(1, "soft", "em_detach"), modules)
    small = learner.pack(samples[1:3])
    selection = learner.pipeline.select(small.supervision, "A")
    stats = learner.pipeline.reader(selection).anchor(as_given(packed_logits(learner.model, small)))
    plain = learner.pipeline(ForwardStats(stats, stats), selection, "A")
    found = learner.loss(small)
    assert torch.allclose(found.total, plain.total, atol=1e-6)
    wanted = learner.gradients(plain)  # of the head over the whole row
    for name, gradient in learner.gradients(found).items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-5, atol=1e-6), name
