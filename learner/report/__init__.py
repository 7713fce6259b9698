"""The pages that show answers: of a run (`report.html`), and of an evaluation.

    write_report    curves, timelines, what was dropped, and a gallery, of a run folder
    write_gallery   the gallery alone, of any logged answers

A page is one file that asks the network for nothing. Nothing here imports torch.

    run folder -> lines, counts, chosen answers   run_view.py, tally.py, choose.py
               -> charts                          curves.py, timeline.py, answer_charts.py
               -> what to look at first           findings.py, head.py
               -> cards with pictures             cards.py, pictures.py, outcomes.py
               -> one HTML file                   run_page.py, gallery.py, page.py, assets/
"""

from learner.report.gallery import write_gallery
from learner.report.run_page import write_report

__all__ = ["write_gallery", "write_report"]
