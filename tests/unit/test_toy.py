"""The toy world: scenes, a whole Qwen3-VL checkpoint, and the pretraining of its vision tower.

Coordinate tokens are added to checkpoints without them.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, Qwen3Config
from typer.testing import CliRunner

from learner.cli import app
from learner.data.jsonl import bounding_box, read_samples
from learner.data.toy import (
    DESCRIPTIONS,
    IMAGE_SIDE,
    MAX_OBJECTS,
    SceneObject,
    ToyData,
    make_data,
    make_scene,
)
from learner.models import toy_vision
from learner.models.coord_tokens import NOISE, describe_expanded, expand_vocab, vocab_modules
from learner.models.toy import make_model, make_text_tokenizer
from learner.models.toy_vision import Losses, pretrain_vision
from learner.stages.tokens import CoordVocab, decode_bin
from learner.types import Sample
from shared_contracts.errors import ContractError
from tests.unit.refusals import refused
from tests.unit.stock_checkpoints import make_stock

# --- scenes


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    return make_data(tmp_path_factory.mktemp("toy") / "data", train=30, val=20, seed=0)


@pytest.fixture(scope="module")
def poly_toy(tmp_path_factory: pytest.TempPathFactory) -> ToyData:
    out = tmp_path_factory.mktemp("toy") / "poly"
    return make_data(out, train=30, val=20, seed=0, polygons=True)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_same_seed_gives_the_same_bytes(toy: ToyData, tmp_path: Path) -> None:
    make_data(tmp_path / "again", train=30, val=20, seed=0)
    assert contents(tmp_path / "again") == contents(toy.train_jsonl.parent)
    splits = (read_samples(each, allow_poly=False) for each in (toy.train_jsonl, toy.val_jsonl))
    train, val = ({sample.objects for sample in split} for split in splits)
    assert not train & val


@pytest.mark.req("DATA-01")
def test_the_files_are_in_the_data_format_with_paths_relative_to_them(toy: ToyData) -> None:
    samples = read_samples(toy.val_jsonl, allow_poly=False)
    assert len(samples) == 20
    assert all(1 <= len(s.objects) <= MAX_OBJECTS for s in samples)
    assert {o.desc for s in samples for o in s.objects} <= set(DESCRIPTIONS)
    first = json.loads(toy.val_jsonl.read_text().splitlines()[0])
    assert first["images"] == ["images/val/00000.png"]
    with Image.open(samples[0].images[0]) as image:
        assert image.size == (samples[0].width, samples[0].height)


def drawn_scenes() -> Iterator[tuple[npt.NDArray[np.bool_], list[SceneObject]]]:
    """Masks of the pixels that are no background, and the objects, of 50 scenes."""
    for seed in range(50):
        image, objects = make_scene(np.random.default_rng(seed))
        pixels = np.asarray(image)
        yield (pixels != pixels[..., :1]).any(axis=-1), objects


def test_boxes_hold_exactly_the_drawn_pixels_and_come_from_the_left() -> None:
    for drawn, objects in drawn_scenes():
        assert [o.box for o in objects] == sorted(o.box for o in objects)
        for o in objects:
            x1, y1, x2, y2 = o.box
            inside = drawn[y1:y2, x1:x2]
            edges = (inside[0], inside[-1], inside[:, 0], inside[:, -1])
            assert all(edge.any() for edge in edges)
            drawn[y1:y2, x1:x2] = False
        assert not drawn.any()


@pytest.mark.req("DATA-01", "RES-02")
def test_triangles_become_polygons_and_all_else_stays(toy: ToyData, poly_toy: ToyData) -> None:
    images = [contents(t.train_jsonl.parent / "images") for t in (toy, poly_toy)]
    assert images[0] == images[1]
    boxes, shapes = (
        [o for s in read_samples(t.train_jsonl, allow_poly=True) for o in s.objects]
        for t in (toy, poly_toy)
    )
    assert [o.desc for o in shapes] == [o.desc for o in boxes]
    for box, item in zip(boxes, shapes, strict=True):
        if "triangle" in item.desc:
            assert (item.shape.kind, len(item.shape.coords)) == ("poly", 6)
            assert bounding_box(item.shape) == box.shape.coords
        else:
            assert item == box
    assert {o.shape.kind for o in shapes} == {"bbox_2d", "poly"}


def test_corners_enclose_what_is_drawn() -> None:
    for drawn, objects in drawn_scenes():
        for o in objects:
            x1, y1, x2, y2 = o.box
            mask = np.zeros_like(drawn)
            mask[y1:y2, x1:x2] = drawn[y1:y2, x1:x2]
            flat = o.corners or (x1, y1, x2, y1, x2, y2, x1, y2)
            code = coco_mask.frPyObjects([list(flat)], IMAGE_SIDE, IMAGE_SIDE)
            inside = coco_mask.decode(code)[..., 0].astype(bool)
            assert (inside & mask).sum() > 0.9 * (inside | mask).sum()


@pytest.mark.req("DATA-02", "IO-01")
def test_pycocotools_reads_the_export_of_boxes_and_polygons(poly_toy: ToyData) -> None:
    coco = COCO(str(poly_toy.coco_val))
    truths = [o for s in read_samples(poly_toy.val_jsonl, allow_poly=True) for o in s.objects]
    for annotation, item in zip(coco.loadAnns(coco.getAnnIds()), truths, strict=True):
        assert ("segmentation" in annotation) == (item.shape.kind == "poly")
        x, y, width, height = annotation["bbox"]
        corners = (n / IMAGE_SIDE for n in (x, y, x + width, y + height))
        assert [*corners] == pytest.approx([decode_bin(k) for k in bounding_box(item.shape)])
        assert coco.cats[annotation["category_id"]]["name"] == item.desc
        if item.shape.kind == "bbox_2d":
            continue
        assert annotation["area"] == pytest.approx(width * height / 2)
        assert coco.annToMask(annotation).sum() == pytest.approx(width * height / 2, rel=0.1)
        (flat,) = annotation["segmentation"]
        assert (min(flat[0::2]), min(flat[1::2])) == pytest.approx((x, y))


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ContractError, match="it has no name"):
        make_data(Path("."), train=1, val=1, seed=0)
    with pytest.raises(ContractError, match="not an empty directory"):
        make_data(tmp_path, train=1, val=1, seed=0)
    assert contents(tmp_path) == {"kept": b""}


def test_the_same_seed_gives_the_same_model(toy_checkpoint: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "again", seed=0)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (toy_checkpoint / name).read_bytes()


# --- coordinate tokens for a checkpoint without them ------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("plain") / "tied", tie=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stock(tmp_path_factory.mktemp("plain") / "untied", tie=False)


def load(path: Path) -> tuple[PreTrainedModel, Any]:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(path)
    return model, AutoProcessor.from_pretrained(path).tokenizer


def text_logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([[40, 50, 60]])).logits
    return logits[..., :length]


@pytest.mark.parametrize("tie", [None, False])
def test_logits_of_old_tokens_do_not_change(tied: Path, tmp_path: Path, tie: bool | None) -> None:
    expand_vocab(tied, tmp_path / "out", seed=0, tie=tie)
    before, tokenizer = load(tied)
    after, _ = load(tmp_path / "out")
    assert after.dtype == before.dtype == torch.bfloat16
    length = len(tokenizer)
    # More rows in the head may be multiplied by another kernel, which rounds otherwise.
    torch.testing.assert_close(text_logits(after, length), text_logits(before, length))


def test_new_rows_are_the_mean_of_old_ones_and_small_noise(untied: Path, tmp_path: Path) -> None:
    expand_vocab(untied, tmp_path / "out", seed=0, tie=None)
    model, tokenizer = load(tmp_path / "out")
    first = CoordVocab.from_tokenizer(tokenizer).ids[0]
    for module in vocab_modules(model):
        weight = module.weight.detach().float()
        old, new = weight[:first], weight[first:]
        assert torch.allclose(new.mean(dim=0), old.mean(dim=0), atol=1e-3)
        noise = new - new.mean(dim=0)
        assert (noise.std() / old.std()).item() == pytest.approx(NOISE, rel=0.05)
        assert (noise[1:] - noise[:-1]).norm(dim=1).max() < 0.3 * noise.norm(dim=1).mean()


def test_untying_copies_the_embedding_into_a_head_of_its_own(tied: Path, tmp_path: Path) -> None:
    expand_vocab(tied, tmp_path / "out", seed=0, tie=False)
    embedding, head = vocab_modules(load(tmp_path / "out")[0])
    assert embedding.weight is not head.weight
    assert torch.equal(embedding.weight, head.weight)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


@pytest.mark.parametrize("rows", [None, 384], ids=["exact", "padded"])
def test_rows_are_padded_as_before_and_described_alike(tmp_path: Path, rows: int | None) -> None:
    plain = make_stock(tmp_path / "plain", tie=True, rows=rows)
    expand_vocab(plain, tmp_path / "out", seed=0, tie=None)
    model, tokenizer = load(tmp_path / "out")
    weight = vocab_modules(model)[0].weight.detach().float()
    padded, tokens = len(weight), len(tokenizer)
    assert padded == (tokens if rows is None else -(-tokens // 128) * 128)
    assert model.config.get_text_config().vocab_size == padded
    assert rows is None or weight[tokens:].std(dim=0).max() == 0
    describe_expanded(plain, tmp_path / "described")
    assert not list((tmp_path / "described").glob("*.safetensors"))
    whole, described = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "described")
    )
    assert described["text_config"]["vocab_size"] == whole["text_config"]["vocab_size"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (
            tmp_path / "described" / name
        ).read_bytes()


def without_im_end(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|im_end|>", "<|stop|>"))


def without_images(folder: Path) -> None:
    shutil.rmtree(folder)
    make_text_tokenizer().save_pretrained(folder)
    Qwen3Config().save_pretrained(folder)


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 100)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config"),
        (cut("config.json"), "its config"),
        (cut("tokenizer.json"), "its tokenizer"),
        (cut("model.safetensors"), "its weights"),
        (without_im_end, "has no <|im_end|>"),
        (without_images, "a model of text alone"),
    ],
)
def test_a_damaged_source_is_refused(
    tied: Path, tmp_path: Path, spoil: Callable[[Path], object], found: str
) -> None:
    source = shutil.copytree(tied, tmp_path / "source")
    spoil(source)
    with refused(str(source), found):
        expand_vocab(source, tmp_path / "out", seed=0, tie=None)
    assert not (tmp_path / "out").exists()


def test_coordinate_tokens_twice_and_tying_of_a_head_are_refused(
    toy_checkpoint: Path, untied: Path, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match="has 1000 coordinate tokens already"):
        expand_vocab(toy_checkpoint, tmp_path / "out", seed=0, tie=None)
    with pytest.raises(ContractError, match="head has weights of its own"):
        expand_vocab(untied, tmp_path / "out", seed=0, tie=True)


# --- pretraining of the vision tower


def scenes(folder: Path, world: str = "plain") -> list[Sample]:
    data = make_data(folder, 16, 1, seed=0, world=world)  # type: ignore[arg-type]
    return read_samples(data.train_jsonl, allow_poly=False)


@pytest.mark.slow
@pytest.mark.req("WORLD-01")
def test_the_losses_fall_and_the_tower_alone_changes(
    toy_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_vision, "REPORT_EVERY", 20)
    told: list[tuple[int, Losses]] = []
    out = tmp_path / "out"
    samples = scenes(tmp_path / "data")
    pretrain_vision(toy_checkpoint, samples, out, 70, 0, lambda *both: told.append(both))
    assert [step for step, _ in told] == [20, 40, 60, 70]
    (_, early), *_, (_, late) = told
    assert late.kind < 0.7 * early.kind
    assert late.box < early.box - 0.5
    before = load_file(toy_checkpoint / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".visual." in name for name in changed)
    files = {path.name for path in toy_checkpoint.iterdir()}
    assert {path.name for path in out.iterdir()} == files


@pytest.mark.req("WORLD-01")
def test_the_command(toy_checkpoint: Path, tmp_path: Path) -> None:
    data, out = make_data(tmp_path / "data", 4, 1, seed=0).train_jsonl, tmp_path / "out"
    options = ["--model", str(toy_checkpoint), "--data", str(data), "--out", str(out)]
    command = ["toy", "pretrain-vision", *options, "--steps", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "step 2/2, loss of kinds" in done.output
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ContractError)
    assert str(out) in str(again.exception)


@pytest.mark.req("WORLD-01")
def test_scenes_and_models_that_it_cannot_use_are_refused_and_nothing_is_left(
    toy_checkpoint: Path, tmp_path: Path
) -> None:
    plain, crowded = scenes(tmp_path / "plain"), scenes(tmp_path / "crowded", "crowded")
    other = tmp_path / "other"
    make_model(other, seed=0, family="qwen2_5_vl")
    two = replace(plain[0], images=plain[0].images + plain[1].images)
    for used, samples, found in (
        (toy_checkpoint, [*plain, *crowded], "images of different sizes"),
        (toy_checkpoint, [plain[1], two], f"{two.sample_id}: it has 2 images"),
        (other, plain, "is a qwen2_5_vl"),
    ):
        with pytest.raises(ContractError, match=re.escape(found)):
            pretrain_vision(used, samples, tmp_path / "out", 2, 0, lambda *_: None)
        assert not (tmp_path / "out").exists()
