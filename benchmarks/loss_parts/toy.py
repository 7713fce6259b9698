"""A step of 32 scenes on the toy model, in packs as the demo makes them."""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.loss_parts.measuring import OBJECTIVE, Bench, forward_and_backward, ours
from benchmarks.results import Result, median_of
from learner.config import load_mapping, merge, parse_config
from learner.config.schema import Config
from learner.data.jsonl import read_samples
from learner.data.toy import ToyData, make_data
from learner.models.load import LoadedModel, load_model
from learner.models.packed_forward import packed_forward
from learner.models.packs import Pack, Segment, make_pack
from learner.models.prompts import PromptEncoder
from learner.models.toy import make_model
from learner.objectives.pipeline import Pipeline
from learner.operate.demo import CONFIGS
from learner.stages.formats.coord_json import serialize_objects
from learner.stages.packing.plan import plan_packs
from learner.training.channels import ChannelA, ChannelB, Encoding
from learner.types import Channel, RolloutOutput, Sample

SCENES = 32


def measure(bench: Bench) -> list[Result]:
    config = _config(bench)
    loaded = load_model(config)
    loaded.model.train()
    prompt = PromptEncoder(loaded.processor, config.template.prompt, None)
    encoding = Encoding(loaded.inner, prompt, loaded.tokenizer, "desc_first")
    samples = read_samples(ToyData.under(bench.folder / "data").train_jsonl, allow_poly=False)
    of_a = ChannelA(encoding).segments(samples)
    of_b, _ = ChannelB(encoding, config.rollout_matching.matching, allow_poly=False).segments(
        samples, [_half_right(sample, encoding) for sample in samples]
    )
    return [
        _share(bench.rounds, loaded, "A", _packs(of_a, config)),
        _share(bench.rounds, loaded, "B", _packs(of_b, config)),
    ]


def _share(rounds: int, loaded: LoadedModel, channel: Channel, packs: list[Pack]) -> Result:
    """Objectives over forward and backward, of all packs together."""
    pipeline = Pipeline(OBJECTIVE, loaded.vocab.ids)
    shares, times = [], []
    for _ in range(rounds + 1):  # the first warms up
        model_s = losses_s = 0.0
        for pack in packs:
            with torch.no_grad():
                logits = _logits(loaded.model, pack)
            cost = ours(pipeline, logits, pack.supervision, channel)
            losses_s += cost.seconds
            model_s += forward_and_backward(partial(_logits, loaded.model, pack), cost.gradient)
        shares.append(losses_s / model_s)
        times.append((losses_s, model_s))
    tokens, (mine, models) = sum(len(pack) for pack in packs), times[-1]
    return median_of(
        f"objectives over the toy model's forward and backward, channel {channel}",
        shares[1:],
        0.15,
        at_least=False,
        detail=f"{1000 * mine:.0f} and {1000 * models:.0f} ms; "
        f"{tokens:,} tokens in {len(packs)} packs",
    )


def _logits(model: nn.Module, pack: Pack) -> Tensor:
    """Of every position, (L, V)."""
    return packed_forward(model, pack, lambda given: given.head(given.hidden))


def _config(bench: Bench) -> Config:
    """The demo's, on data and a model of this run."""
    data = make_data(bench.folder / "data", SCENES, 1, seed=0)
    make_model(bench.folder / "model", seed=0)
    places = {
        "model": {"model": str(bench.folder / "model")},
        "data": {"train_jsonl": str(data.train_jsonl), "val_jsonl": str(data.val_jsonl)},
        "training": {"output_dir": str(bench.folder / "run")},
    }
    return parse_config(merge(load_mapping(CONFIGS / "warmup.yaml"), places))


def _half_right(sample: Sample, encoding: Encoding) -> RolloutOutput:
    """An answer that has the first object of each scene, and nothing else."""
    text = serialize_objects(sample.objects[:1], encoding.field_order)
    prompt = encoding.prompt(sample).ids.tolist()
    ids = encoding.tokenizer.encode(text, add_special_tokens=False)
    return RolloutOutput(prompt, ids, text, "stop", False, (1, 1), None)


def _packs(segments: list[Segment], config: Config) -> list[Pack]:
    lengths = [len(segment) for segment in segments]
    plan = plan_packs(lengths, config.global_max_length, config.training.packing_min_fill_ratio)
    return [make_pack([segments[i] for i in indices]) for indices in plan]
