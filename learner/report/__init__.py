"""The pages that show answers: of a run (`report.html`), and of an evaluation.

    write_report    curves, timelines, what was dropped, and a gallery, of a run folder
    write_gallery   the gallery alone, of any logged answers

A page is one file that asks the network for nothing. Nothing here imports torch.

    RunFolder -> tally, chosen answers                 tally.py, choose.py
              -> charts, findings, facts               curves.py, timeline.py, findings.py, head.py
              -> cards with pictures                   cards.py, pictures.py
              -> one HTML file                         page.py, assets/
"""

from learner.report.gallery import write_gallery

__all__ = ["write_gallery"]
