"""Answers as pictures with boxes: what the page has to know, and a page of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learner.config.rollout_matching import MatchingConfig
from learner.report.answer_charts import drop_meanings
from learner.report.cards import ROLES, cards_of
from learner.report.choose import choose
from learner.report.outcomes import FAULTS
from learner.report.page import asset, publish_page
from learner.rollout_log import LoggedAnswer


@dataclass(frozen=True)
class Gallery:
    """answers: those shown, the worst first. logged: how many there are.

    replay: the command that builds a step again, without the step; empty in an evaluation.
    """

    answers: Sequence[LoggedAnswer]
    logged: int
    resolution: int
    replay: str = ""

    def data(self) -> dict[str, Any]:
        """For the page's script."""
        cards, pictures = cards_of(self.answers, self.resolution)
        return {
            "cards": [asdict(card) for card in cards],
            "pictures": [asdict(picture) for picture in pictures],
            "faults": {name: [fault.label, fault.meaning] for name, fault in FAULTS.items()},
            "roles": ROLES,
            "drops": drop_meanings(),
            "logged": self.logged,
            "of_run": bool(self.replay),
            "replay": self.replay,
            "none": "No answers are logged.",
        }


def write_gallery(
    answers: Sequence[LoggedAnswer], out: Path, title: str, facts: Mapping[str, str]
) -> None:
    """Write a page with these answers alone, e.g. those of an evaluation.

    facts: shown at the head, in this order, e.g. scores, model and data. At most 200 answers are
    shown, the worst first; the page says of how many.
    """
    gallery = Gallery(choose(answers), len(answers), MatchingConfig().maskiou_resolution)
    publish_page(
        out,
        "gallery.html",
        [asset("theme.js"), asset("gallery.js")],
        {"title": title, "facts": facts, "gallery": gallery.data()},
    )
