"""The pages that show answers: of a run (`report.html`), and of an evaluation.

    write_report    curves, timelines, what was dropped, and a gallery, of a run folder
    write_gallery   the gallery alone, of any logged answers; of an evaluation with its scores

A page is one file that asks the network for nothing. Nothing here imports torch.

    run folder -> lines, evaluations, head        run_view.py
               -> counts, chosen answers          answers.py
               -> charts                          charts.py
               -> what to look at first           findings.py
               -> cards with pictures             gallery.py
               -> one HTML file                   run_page.py, page.py, assets/
    scores.json -> tables of an evaluation        gallery.py
"""

from learner.analysis.report.gallery import write_gallery
from learner.analysis.report.run_page import write_report

__all__ = ["write_gallery", "write_report"]
