"""The objectives as the contract words them, one token and one slot at a time, in float64.

The oracle of the losses: numbers and `math`, no tensors, and only the config and row types of
`learner.objectives`. The logits at p-1 predict the token at position p.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from learner.objectives.bbox_geo import BboxGeoConfig
from learner.objectives.config import ObjectiveModule, PipelineConfig
from learner.objectives.coord_reg import CoordRegConfig
from learner.objectives.duplicate_ul import DuplicateULConfig
from learner.objectives.logit_stats import Supervision
from learner.objectives.policy_gradient import PolicyGradientConfig
from learner.objectives.token_ce import TokenCEConfig
from learner.types import Channel, Role

Numbers = Sequence[float]
BINS = 1000


def bounded(logit: float, temperature: float = 1.0) -> float:
    scaled = logit / temperature
    return 0.0 if math.isnan(scaled) else min(max(scaled, -1e4), 1e4)


def logsumexp(values: Numbers) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def log_softmax(values: Numbers) -> list[float]:
    total = logsumexp(values)
    return [value - total for value in values]


@lru_cache(maxsize=64)
def soft_target(target: float, sigma: float, truncate: int | None) -> list[float]:
    """q(k), k of 0..999; the exponent of the nearest bin is taken out of all of them."""
    far = math.inf if truncate is None else truncate
    exponents = [-(((k - target) / sigma) ** 2) / 2 for k in range(BINS)]
    top = max(exponents)
    bell = [
        math.exp(exponent - top) if abs(k - target) <= far else 0.0
        for k, exponent in enumerate(exponents)
    ]
    total = sum(bell)
    return [weight / total for weight in bell]


def wasserstein1(p: Numbers, q: Numbers) -> float:
    distance = cdf_p = cdf_q = 0.0
    for k in range(BINS):
        cdf_p += p[k]
        cdf_q += q[k]
        distance += abs(cdf_p - cdf_q)
    return distance / 999


def smooth_l1(predicted: float, truth: float) -> float:
    error = abs(predicted - truth)
    return error**2 / 2 if error < 1 else error - 0.5


def canonical(box: Numbers) -> list[float]:
    x1, y1, x2, y2 = (min(max(value, 0.0), 1.0) for value in box)
    return [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)]


def aspect_and_iou(predicted: Numbers, truth: Numbers) -> tuple[float, float]:
    """v and the IoU of CIoU; Zheng et al., "Distance-IoU Loss"."""
    px1, py1, px2, py2 = canonical(predicted)
    tx1, ty1, tx2, ty2 = canonical(truth)
    width = max(0.0, min(px2, tx2) - max(px1, tx1))
    height = max(0.0, min(py2, ty2) - max(py1, ty1))
    both = width * height
    union = (px2 - px1) * (py2 - py1) + (tx2 - tx1) * (ty2 - ty1) - both
    truth_angle = math.atan((tx2 - tx1) / (ty2 - ty1 + 1e-7))
    angle = math.atan((px2 - px1) / (py2 - py1 + 1e-7))
    return 4 / math.pi**2 * (truth_angle - angle) ** 2, both / (union + 1e-7)


def trade_off(predicted: Numbers, truth: Numbers) -> float:
    """alpha of CIoU, a constant for the gradient."""
    v, iou = aspect_and_iou(predicted, truth)
    return v / (1 - iou + v + 1e-7)


def ciou(predicted: Numbers, truth: Numbers, alpha: float) -> float:
    v, iou = aspect_and_iou(predicted, truth)
    px1, py1, px2, py2 = canonical(predicted)
    tx1, ty1, tx2, ty2 = canonical(truth)
    across = ((px1 + px2 - tx1 - tx2) / 2) ** 2 + ((py1 + py2 - ty1 - ty2) / 2) ** 2
    diagonal = (max(px2, tx2) - min(px1, tx1)) ** 2 + (max(py2, ty2) - min(py1, ty1)) ** 2
    return 1 - iou + across / (diagonal + 1e-7) + alpha * v


def token_weight(role: int, dropped: bool, config: TokenCEConfig, channel: Channel) -> float:
    """LOSS-01, in the order of its sentences."""
    multiplier = config.rollout_drop_invalid_struct_ce_multiplier if dropped else 1.0
    if role == Role.APPENDED_DESC:
        return config.desc_ce_weight if channel == "A" else config.rollout_fn_desc_weight
    if role == Role.MATCHED_STRUCTURE:
        return config.rollout_matched_prefix_struct_weight * multiplier
    if role == Role.APPENDED_STRUCTURE:
        return multiplier
    return 1.0 if role == Role.CLOSURE else 0.0


@dataclass(frozen=True)
class Plain:
    """A declared pipeline over one row; logits are (L, V) tensors of any type.

    start: those of the model that the run started from.
    """

    config: PipelineConfig
    channel: Channel
    row: Supervision
    coord_ids: Sequence[int]
    start: Tensor | None = None

    def total(self, logits: Sequence[Tensor]) -> float:
        return sum(self.atoms(logits).values())

    def slope(
        self, logits: Sequence[Tensor], direction: Sequence[Tensor], step: float = 1e-6
    ) -> float:
        """Central difference of the total, alpha of CIoU held where it is."""

        def total(by: float) -> float:
            moved = [z + by * d for z, d in zip(logits, direction, strict=True)]
            return sum(self.atoms(moved, base=logits[-1]).values())

        return (total(step) - total(-step)) / (2 * step)

    def atoms(self, logits: Sequence[Tensor], base: Tensor | None = None) -> dict[str, float]:
        """Return the values of all terms with a weight above 0.

        logits: of the one forward, or of the first and the last of several. base: those of the
            last forward that CIoU's alpha is taken from, where others are only near them.
        """
        first, final = logits[0], logits[-1]
        last = final if len(logits) > 1 else None
        at = final if base is None else base
        atoms: dict[str, float] = {}
        for module in self.config.objective:
            if module.enabled and self.channel in module.channels:
                for name, value in self._terms(module, first, last, final, at):
                    atoms[name] = module.weight * value
        return atoms

    def _terms(
        self, module: ObjectiveModule, first: Tensor, last: Tensor | None, final: Tensor, at: Tensor
    ) -> Iterator[tuple[str, float]]:
        coord = "loss/A2_coord" if self.channel == "A" else "loss/B_coord"
        if module.name == "duplicate_ul":
            yield "loss/B_rollout_text/duplicate_ul", self._duplicate_ul(module.config, first)
        elif module.name == "policy_gradient":
            yield from self._policy_gradient(module.config, first)
        elif module.name == "token_ce":
            yield from self._token_ce(module.config, first, last)
        elif module.name == "bbox_geo":
            for name, value in self._bbox_geo(module.config, final, at):
                yield f"{coord}/{name}", value
        else:
            for name, value in self._coord_reg(module.config, final):
                yield f"{coord}/{name}", value

    # Cross-entropy

    def text(self) -> list[tuple[int, float]]:
        """(position, weight) of each supervised token that is not a coordinate."""
        for module in self.config.objective:
            if module.name == "token_ce" and module.enabled and self.channel in module.channels:
                pairs = zip(self.row.roles.tolist(), self.row.has_dropped.tolist(), strict=True)
                weights = [token_weight(*pair, module.config, self.channel) for pair in pairs]
                return [(p, weight) for p, weight in enumerate(weights) if weight > 0]
        return []

    def _token_ce(
        self, config: TokenCEConfig, first: Tensor, last: Tensor | None
    ) -> Iterator[tuple[str, float]]:
        family = "loss/A1_text" if self.channel == "A" else "loss/B_rollout_text"
        text = self.text()
        structure = [pair for pair in text if self.row.roles[pair[0]] != Role.APPENDED_DESC]
        desc = [pair for pair in text if self.row.roles[pair[0]] == Role.APPENDED_DESC]
        over = sum(weight for _, weight in text)
        yield f"{family}/struct_ce", self._cross_entropy(first, structure, over)
        yield f"{family}/desc_ce", self._cross_entropy(first, desc, over)
        if last is not None and config.self_context_struct_ce_weight > 0:
            mean = self._cross_entropy(last, structure, sum(weight for _, weight in structure))
            yield "loss/A2_text/struct_ce", config.self_context_struct_ce_weight * mean

    def _cross_entropy(self, logits: Tensor, text: list[tuple[int, float]], over: float) -> float:
        total = 0.0
        for position, weight in text:
            row = [bounded(logit) for logit in logits[position - 1].tolist()]
            total += weight / over * (logsumexp(row) - row[int(self.row.input_ids[position])])
        return total

    # Duplicates

    def departures(self) -> list[tuple[int, int]]:
        """(position, token) of each duplicate that unlikelihood is declared for."""
        for module in self.config.objective:
            if module.name == "duplicate_ul" and module.enabled and self.channel in module.channels:
                found = [(position, token) for position, token in self.row.departures.tolist()]
                anything = module.config.radius is None
                return [pair for pair in found if anything or pair[1] in self.coord_ids]
        return []

    def _duplicate_ul(self, config: DuplicateULConfig, logits: Tensor) -> float:
        """Mean of `-log(1 - p)`; 1 - p, the probability of all other tokens, is at least 1e-6."""
        total, departures = 0.0, self.departures()
        for position, token in departures:
            log_p = log_softmax([bounded(logit) for logit in logits[position - 1].tolist()])
            off = self._counted_as(token, int(self.row.input_ids[position]), config.radius)
            others = logsumexp([value for index, value in enumerate(log_p) if index not in off])
            total -= max(others, math.log(1e-6))
        return total / max(len(departures), 1)

    def _counted_as(self, token: int, target: int, radius: int | None) -> set[int]:
        """The ids that are one with a departing token."""
        if radius is None:
            return {token}
        own = self.coord_ids.index(token)
        near = set(range(own - radius, own + radius + 1)) & set(range(BINS))
        if target in self.coord_ids:
            aim = self.coord_ids.index(target)
            near = {bin_ for bin_ in near if abs(bin_ - own) < abs(bin_ - aim)}
        return {self.coord_ids[bin_] for bin_ in near}

    # Answer tokens

    def answer_tokens(self) -> list[tuple[int, float, float]]:
        """(position, the engine's log-probability, advantage) of each kept token."""
        row = self.row
        found = (row.kept_positions, row.kept_logprobs, row.kept_advantages)
        return list(zip(*(tensor.tolist() for tensor in found), strict=True))

    def log_p(self, logits: Tensor, position: int) -> float:
        row = [bounded(logit) for logit in logits[position - 1].tolist()]
        return row[int(self.row.input_ids[position])] - logsumexp(row)

    def _policy_gradient(
        self, config: PolicyGradientConfig, logits: Tensor
    ) -> Iterator[tuple[str, float]]:
        surrogate = divergence = 0.0
        tokens = self.answer_tokens()
        for position, log_q, advantage in tokens:
            log_p = self.log_p(logits, position)
            ratio = math.exp(log_p - log_q)
            held = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            surrogate -= min(ratio * advantage, held * advantage)
            if self.start is not None:
                d = self.log_p(self.start, position) - log_p
                divergence += math.exp(d) - d - 1
        over = max(len(tokens), 1)
        yield "loss/B_answer/policy_gradient", surrogate / over
        if self.start is not None:
            yield "loss/B_answer/kl", config.kl_weight * divergence / over

    # Coordinates

    def slots(self) -> list[tuple[int, float]]:
        """(position, target in bins) of each supervised coordinate."""
        positions, bins = self.row.coord_positions.tolist(), self.row.coord_bins.tolist()
        return list(zip(positions, bins, strict=True))

    def _bins(self, logits: Tensor, position: int, temperature: float) -> list[float]:
        """Log-probabilities of the 1000 coordinates among themselves."""
        row = logits[position - 1].tolist()
        return log_softmax([bounded(row[index], temperature) for index in self.coord_ids])

    def _decoded(self, logits: Tensor) -> list[float]:
        slots = [self._bins(logits, position, 1.0) for position, _ in self.slots()]
        return [sum(math.exp(bins[k]) * k / 999 for k in range(BINS)) for bins in slots]

    def _bbox_geo(
        self, config: BboxGeoConfig, logits: Tensor, at: Tensor
    ) -> Iterator[tuple[str, float]]:
        decoded, near = self._decoded(logits), self._decoded(at)
        truth = [target / 999 for _, target in self.slots()]
        smooth = complete = 0.0
        boxes = self.row.boxes.tolist()
        for box in boxes:
            predicted, wanted = [decoded[i] for i in box], [truth[i] for i in box]
            for one, other in zip(predicted, wanted, strict=True):
                smooth += smooth_l1(one, other) / (4 * len(boxes))
            alpha = trade_off([near[i] for i in box], wanted)
            complete += ciou(predicted, wanted, alpha) / len(boxes)
        if config.smoothl1_weight > 0:
            yield "bbox_smoothl1", config.smoothl1_weight * smooth
        if config.ciou_weight > 0:
            yield "bbox_ciou", config.ciou_weight * complete

    def _coord_reg(self, config: CoordRegConfig, logits: Tensor) -> Iterator[tuple[str, float]]:
        slots, text = self.slots(), self.text()
        weights = {
            "coord_ce": config.coord_ce_weight,
            "coord_soft_ce": config.soft_ce_weight,
            "coord_w1": config.w1_weight,
            "coord_gate": config.coord_gate_weight,
        }
        sums = dict.fromkeys(weights, 0.0)
        for position, target in slots:
            q = soft_target(target, config.target_sigma, config.target_truncate)
            log_p = self._bins(logits, position, config.temperature)
            sums["coord_ce"] -= log_p[round(target)]
            sums["coord_soft_ce"] -= sum(q[k] * log_p[k] for k in range(BINS))
            sums["coord_w1"] += wasserstein1([math.exp(value) for value in log_p], q)
            sums["coord_gate"] += self._coord_gate(logits, position, config.temperature)
        for name, weight in weights.items():
            if weight > 0:
                yield name, weight * sums[name] / max(len(slots), 1)
        if config.text_gate_weight > 0:
            gates = [self._text_gate(logits, p, config.temperature) for p, _ in text]
            yield "text_gate", config.text_gate_weight * sum(gates) / max(len(text), 1)

    def _coord_gate(self, logits: Tensor, p: int, temperature: float) -> float:
        row = [bounded(logit, temperature) for logit in logits[p - 1].tolist()]
        return logsumexp(row) - logsumexp([row[index] for index in self.coord_ids])

    def _text_gate(self, logits: Tensor, p: int, temperature: float) -> float:
        """`-log(1 - p_coord)`, where 1 - p_coord is the probability of all the rest."""
        row = log_softmax([bounded(logit, temperature) for logit in logits[p - 1].tolist()])
        coordinates = set(self.coord_ids)
        rest = sum(math.exp(value) for index, value in enumerate(row) if index not in coordinates)
        return -math.log(max(rest, 1e-6))

    # Monitors

    def diagnostics(self, logits: Tensor, temperature: float) -> dict[str, float]:
        """Sums over the supervised coordinates, by name (LOSS-06)."""
        names = ("acc_top1", "acc_top5", "p_gt_mean", "expected_bin_mae", "entropy_mean")
        sums = dict.fromkeys((*names, "coord_mass_mean"), 0.0)
        for position, target in self.slots():
            bins = self._bins(logits, position, 1.0)
            ranked = sorted(range(BINS), key=lambda k: -bins[k])
            probs = [math.exp(log_prob) for log_prob in bins]
            sums["acc_top1"] += ranked[0] == round(target)
            sums["acc_top5"] += round(target) in ranked[:5]
            sums["p_gt_mean"] += probs[round(target)]
            sums["expected_bin_mae"] += abs(sum(k * probs[k] for k in range(BINS)) - target)
            sums["entropy_mean"] -= sum(p * log_p for p, log_p in zip(probs, bins, strict=True))
            sums["coord_mass_mean"] += math.exp(-self._coord_gate(logits, position, temperature))
        return sums
