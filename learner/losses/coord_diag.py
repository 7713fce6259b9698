"""`coord_diag`: what the coordinate distributions say of the ground truth (LOSS-06).

Monitors: they see no gradient and add to no loss. Every value is a sum over slots, to be
divided by their number wherever packs and processes meet.
"""

import torch

from learner.coords import COORD_BINS
from learner.losses.fences import coord_log_probs, coord_mass
from learner.losses.reading import Reading
from learner.losses.supervision import Selection

_TOP = 5


@torch.no_grad()
def coord_diag(reading: Reading, selection: Selection, temperature: float) -> dict[str, float]:
    """Sums over the K supervised slots, by name.

    The ground truth's bin is the nearest one of a target between bins. `expected_bin_mae`
    is the distance in bins of the mean of the distribution to the target itself.
    `coord_mass_mean` is the share of the coordinate tokens in the whole vocabulary, at the
    gates' temperature; all else is at temperature 1.
    """
    log_probs = coord_log_probs(reading.slot_coord_logits)
    probs = log_probs.exp()
    truth = selection.slot_bins.round().long()[:, None]
    top = log_probs.topk(_TOP, dim=-1).indices
    mean = (probs * torch.arange(COORD_BINS, device=probs.device)).sum(-1)
    mass = coord_mass(reading.slot_lse, reading.slot_coord_logits, temperature)
    values = {
        "acc_top1": (top[:, :1] == truth).any(-1),
        "acc_top5": (top == truth).any(-1),
        "p_gt_mean": probs.gather(1, truth),
        "expected_bin_mae": (mean - selection.slot_bins).abs(),
        "entropy_mean": -(probs * log_probs).sum(-1),
        "coord_mass_mean": mass,
    }
    names, sums = list(values), torch.stack([value.sum().double() for value in values.values()])
    return dict(zip(names, sums.tolist(), strict=True))
