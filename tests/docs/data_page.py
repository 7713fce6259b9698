"""The files that docs/data.md shows commands on: toy scenes, and faults put into copies."""

import json
from pathlib import Path
from typing import Any

import yaml

from learner.config import dump_mapping
from learner.data.toy import make_data
from tests.docs.documents import ROOT


def make(folder: Path, model: Path) -> None:
    """`toy/`, with `mine.jsonl` and `instances.json`, and `train.yaml`, under `folder`."""
    data = make_data(folder / "toy", train=200, val=20, seed=0)
    lines = data.train_jsonl.read_text().splitlines()
    (folder / "toy" / "mine.jsonl").write_text("\n".join(_with_faults(lines)) + "\n")
    coco = json.loads(data.coco_train.read_text())
    (folder / "toy" / "instances.json").write_text(json.dumps(_with_losses(coco)))
    warmup = yaml.safe_load((ROOT / "configs" / "demo" / "warmup.yaml").read_text())
    warmup["model"]["model"] = str(model)
    warmup["data"] = {"train_jsonl": "toy/train.jsonl", "val_jsonl": "toy/val.jsonl"}
    warmup["rollout_matching"]["max_new_tokens"] = 80
    (folder / "train.yaml").write_text(dump_mapping(warmup))


def _with_faults(lines: list[str]) -> list[str]:
    """Six scenes; all but the first and the last have a fault."""
    _, corner, size, twice, thin = (json.loads(line) for line in lines[:5])
    corner["objects"][0]["bbox_2d"][2] = 1200
    size["width"] = 128
    thin["objects"].append({"desc": "red line", "bbox_2d": [40, 40, 40, 90]})
    repeated = json.dumps(twice).replace('"width": 64', '"width": 64, "width": 64')
    faulty = [json.dumps(corner), json.dumps(size), repeated, json.dumps(thin)]
    return [lines[0], *faulty, lines[5]]


def _with_losses(coco: dict[str, Any]) -> dict[str, Any]:
    """One of each thing that a conversion leaves out or changes."""
    images, annotations = coco["images"], coco["annotations"]
    lost = images[0] | {"id": 9000, "file_name": "images/train/lost.png"}
    by_id = {annotation["id"]: annotation for annotation in annotations}
    by_id[4]["iscrowd"] = 1
    x, y, _, height = by_id[6]["bbox"]
    by_id[6]["bbox"] = [x, y, 64.5 - x, height]
    again = by_id[1] | {"id": 9001}
    flat = by_id[2] | {"id": 9002, "bbox": [x, y, 0, height]}
    return coco | {"images": [*images, lost], "annotations": [*annotations, again, flat]}
