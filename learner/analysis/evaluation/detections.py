"""Answers as COCO detections and their average precision (EVAL-01). Imports no torch.

With log-probabilities (`rollout_matching.logprobs`) the score of a detection is the confidence of
its box (LOGP-01). Without them all scores are 1, and pycocotools ranks detections in the order of
the data file. Then only the end of the precision-recall curve has a meaning, and AP is about
precision times recall, averaged over IoU thresholds. Compare AP only between equal rankings.

Categories are descriptions in Unicode NFC, of ground truths and of predictions. COCO averages over
categories with ground truth, so AP ignores other predicted categories; such a prediction reduces
the recall of the object that it misnames.

With LVIS's lists in the data, the protocol is that of LVIS (Gupta, Dollar and Girshick, CVPR 2019):
detections of a category count in images that show it or whose list excludes it. Detections without
an object are ignored in images that are not annotated exhaustively for their category.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from io import StringIO
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from learner.data.coco import to_coco, to_lvis
from learner.runs.metrics import Payload
from learner.runs.rollout_log import LoggedAnswer, LoggedObject
from learner.types import GroundTruthObject, ParsedObject, Sample, normalized

SCORE = 1.0
# LVIS's limit of detections in an image, over all categories.
_OF_AN_IMAGE = 300

Overlap = Literal["bbox", "segm"]


def confidence(found: ParsedObject, logprobs: Sequence[float] | None) -> float | None:
    """Return the geometric mean of the probabilities of the coordinate tokens, 0 to 1.

    The mean does not depend on the number of tokens (length-normalised likelihood; Malinin and
    Gales, "Uncertainty estimation in autoregressive structured prediction", ICLR 2021).

    logprobs: of all tokens of the answer; None without them.
    """
    if logprobs is None:
        return None
    return exp(fmean(logprobs[position] for position in found.coord_token_indices))


@dataclass(frozen=True)
class CocoFiles:
    """Ground truth and detections in pixels, for `pycocotools`.

    ground_truth: for `COCO`; image i is the i-th answer in the order of the data file.
    detections: for its `loadRes`; with ids, for FiftyOne.
    polygons: every object has a `segmentation`; that of a box is its four corners.
    ranked: scores are confidences; else all scores are 1.
    federated: any image has LVIS's lists; then `ground_truth` has them for all images.
    """

    ground_truth: dict[str, Any]
    detections: list[dict[str, Any]]
    polygons: bool
    ranked: bool
    federated: bool

    @classmethod
    def of(
        cls, answers: Sequence[LoggedAnswer], image_root: Path, *, polygons: bool
    ) -> "CocoFiles":
        """Convert answers. polygons: False in the two-channel variant. image_root: of names."""
        in_order = sorted(answers, key=data_order)
        samples = [_with_objects(answer, answer.ground_truth) for answer in in_order]
        answered = [_with_objects(answer, answer.parse.objects) for answer in in_order]
        predicted = to_coco(answered, image_root)
        names = {category["id"]: category["name"] for category in predicted["categories"]}
        federated = any(answer.category_lists for answer in in_order)
        truth = (to_lvis if federated else to_coco)(samples, image_root, behind=names.values())
        ids = {category["name"]: category["id"] for category in truth["categories"]}
        scores = [item.confidence for answer in in_order for item in answer.parse.objects]
        # Constant scores would rank above confidences, so they are not mixed.
        ranked = bool(scores) and None not in scores
        if not ranked:
            scores = [SCORE] * len(scores)
        detections = [
            {
                "id": found["id"],
                "image_id": found["image_id"],
                "category_id": ids[names[found["category_id"]]],
                "score": score,
                **{key: found[key] for key in ("bbox", "segmentation") if key in found},
            }
            for found, score in zip(predicted["annotations"], scores, strict=True)
        ]
        if polygons:
            for item in [*truth["annotations"], *detections]:
                item.setdefault("segmentation", [_corners(item["bbox"])])
        return cls(truth, detections, polygons, ranked, federated)

    @property
    def ranked_by(self) -> str:
        return "confidence" if self.ranked else "constant"

    @property
    def protocol(self) -> str:
        return "lvis" if self.federated else "coco"


def data_order(answer: LoggedAnswer) -> tuple[str, int]:
    """Return a sort key for the order of the data file; sample ids are `file:line`."""
    file, _, line = answer.sample_id.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _with_objects(answer: LoggedAnswer, objects: Sequence[LoggedObject]) -> Sample:
    named = tuple(GroundTruthObject(normalized(o.desc), o.shape) for o in objects)
    return replace(answer.sample, objects=named)


def _corners(bbox: Sequence[float]) -> list[float]:
    x, y, width, height = bbox
    return [x, y, x + width, y, x + width, y + height, x, y + height]


@dataclass(frozen=True)
class AveragePrecision:
    """COCO's summary for 100 detections per category and image; LVIS's for 300 per image.

    ap: over IoU 0.50 to 0.95. ap_small, ap_medium, ap_large: of areas to 32^2, to 96^2 and above,
    in square pixels. ar: recall, averaged over the same IoUs. None without such ground truth.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ar: float | None


# pycocotools' `precision` (IoU, recall, category, area, detections) and `recall` (IoU, category,
# area, detections); -1 without ground truth. Areas: all, small, medium, large. The last index of
# `detections` is the largest limit.
Curves = Mapping[str, Any]


@dataclass(frozen=True)
class CategoryPrecision:
    """Average precision of one description; None without ground truth."""

    name: str
    ground_truths: int
    predicted: int
    ap: float | None
    ap50: float | None
    ar: float | None


@dataclass(frozen=True)
class Detected:
    """Average precision by one kind of overlap.

    objects: means over the categories. alone: with all descriptions as one category.
    categories: ordered by id.
    """

    objects: AveragePrecision
    alone: AveragePrecision
    categories: tuple[CategoryPrecision, ...]


def detect(files: CocoFiles) -> dict[Overlap, Detected]:
    kinds: tuple[Overlap, ...] = ("bbox", "segm") if files.polygons else ("bbox",)
    with redirect_stdout(StringIO()):  # pycocotools prints its progress
        truth, found = _loaded(files)
        most = [_OF_AN_IMAGE] if files.federated else [1, 10, 100]
        return {kind: _detected(truth, found, kind, most) for kind in kinds}


def precision_payload(detected: dict[Overlap, Detected]) -> Payload:
    """Return the metrics of an evaluation, without those that have no ground truth."""
    boxes = detected["bbox"]
    values = {f"eval/{name}": value for name, value in asdict(boxes.objects).items()}
    values |= {"eval/box_ap": boxes.alone.ap, "eval/box_ap50": boxes.alone.ap50}
    if masks := detected.get("segm"):
        of_masks = masks.objects
        values |= {"eval/segm_ap": of_masks.ap, "eval/segm_ap50": of_masks.ap50}
        values["eval/segm_ap75"] = of_masks.ap75
    payload = Payload()
    payload.note({key: value for key, value in values.items() if value is not None})
    return payload


def _loaded(files: CocoFiles) -> tuple[COCO, COCO]:
    """Return ground truth and detections from copies, because pycocotools changes its arguments."""
    truth = _coco(deepcopy(files.ground_truth))
    found = list(_decided(files, truth)) if files.federated else files.detections
    if found:
        return truth, truth.loadRes(deepcopy(found))
    return truth, _coco({**truth.dataset, "annotations": []})  # loadRes fails on an empty list


def _decided(files: CocoFiles, truth: COCO) -> Iterator[dict[str, Any]]:
    """Yield the first 300 detections of each image, of categories that it shows or excludes."""
    of_image = defaultdict(list)
    for found in files.detections:
        of_image[found["image_id"]].append(found)
    for image, detections in of_image.items():
        decided = {*truth.imgs[image]["neg_category_ids"]}
        decided |= {shown["category_id"] for shown in truth.imgToAnns[image]}
        ranked = sorted(detections, key=lambda found: -found["score"])
        yield from (one for one in ranked[:_OF_AN_IMAGE] if one["category_id"] in decided)


def _coco(dataset: dict[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = dataset
    coco.createIndex()
    return coco


def _detected(truth: COCO, found: COCO, kind: Overlap, most: list[int]) -> Detected:
    """Evaluate one kind of overlap. most: limits of detections per image, ascending."""
    scored = COCOeval(truth, found, kind)
    scored.params.maxDets, scored.params.useCats = most, 0
    alone = _means([_curves(scored)])
    scored.params.useCats = 1
    of_each = {c: _of_category(scored, c) for c in truth.cats if truth.catToImgs.get(c)}
    categories = tuple(_by_category(truth, found, of_each))
    return Detected(_means(list(of_each.values())), alone, categories)


def _of_category(scored: COCOeval, category: int) -> Curves:
    """Return the curves of one description, over the images that contain it.

    pycocotools itself visits every image for each description, which is slow for thousands.
    """
    truth, found = scored.cocoGt.catToImgs, scored.cocoDt.catToImgs
    images = {*truth[category], *found.get(category, ())}
    scored.params.catIds, scored.params.imgIds = [category], sorted(images)
    return _curves(scored)


def _curves(scored: COCOeval) -> Curves:
    """Evaluate the categories and images of `scored.params`; LVIS's lists select its protocol."""
    scored.evaluate()
    for found in scored.evalImgs:
        if found is None:
            continue
        partly = scored.cocoGt.imgs[found["image_id"]].get("not_exhaustive_category_ids")
        if partly:
            categories = [scored.cocoDt.anns[one]["category_id"] for one in found["dtIds"]]
            found["dtIgnore"] |= (found["dtMatches"] == 0) & np.isin(categories, partly)
    scored.accumulate()
    return {name: scored.eval[name] for name in ("precision", "recall")}


def _means(of_each: Sequence[Curves]) -> AveragePrecision:
    """Return means over the categories with ground truth, as in pycocotools."""
    if not of_each:
        return AveragePrecision(*[None] * 7)
    precision = np.concatenate([each["precision"] for each in of_each], axis=2)[..., -1]
    recall = np.concatenate([each["recall"] for each in of_each], axis=1)[..., -1]
    whole = precision[..., 0]
    at_50, at_75 = whole[:1], whole[5:6]
    by_size = (precision[..., size] for size in (1, 2, 3))
    return AveragePrecision(*map(_mean, (whole, at_50, at_75, *by_size, recall[..., 0])))


def _by_category(
    truth: COCO, found: COCO, of_each: Mapping[int, Curves]
) -> Iterator[CategoryPrecision]:
    """Yield the numbers of each category; `catToImgs` has an entry for each object."""
    for category, named in truth.cats.items():
        precision = recall = np.empty(0)
        if curves := of_each.get(category):
            precision = curves["precision"][:, :, 0, 0, -1]
            recall = curves["recall"][:, 0, 0, -1]
        yield CategoryPrecision(
            named["name"],
            len(truth.catToImgs.get(category, ())),
            len(found.catToImgs.get(category, ())),
            _mean(precision),
            _mean(precision[:1]),
            _mean(recall),
        )


def _mean(values: Any) -> float | None:
    """Return the mean without -1, pycocotools' value without ground truth; None if empty."""
    valid = values[values > -1]
    return float(np.mean(valid)) if valid.size else None
