"""A run under load as one picture: memory, files and threads, and latencies over its minutes."""

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.picture_style import STYLE
from benchmarks.png import small_png
from benchmarks.reliability.samples import WARM_UP, Sample, percentile

# Of the picture's palette: a third of the bytes of one without.
PALETTE = 128
SMALL_MIB = 100
# Okabe and Ito's colours, and for who sees none of them, dashes.
LINES = (
    ("#0072B2", "-"),
    ("#D55E00", "--"),
    ("#009E73", "-."),
    ("#444444", ":"),
    ("#CC79A7", (0, (5, 1, 1, 1))),
)


def picture(samples: Sequence[Sample]) -> bytes:
    """PNG of 1430 x 770 pixels."""
    minutes = [sample.seconds / 60 for sample in samples]
    with rc_context(STYLE | {"font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
        panels = list(figure.subplots(2, 2).flat)
        _draw_held(panels[0], "Resident memory, MiB", "rss_mib", samples, minutes)
        _draw_held(panels[1], "Threads", "threads", samples, minutes)
        _draw_files(panels[2], samples, minutes)
        _draw_latencies(panels[3], samples, minutes)
        for panel in panels:
            panel.axvline(WARM_UP * minutes[-1], color="#888888", linewidth=1)
        for panel in panels[2:]:
            panel.set_xlabel("minutes; what is left of the grey line warms up")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        return small_png(figure, PALETTE)


def _shown(samples: Sequence[Sample]) -> list[str]:
    """Names of the processes but for the small helpers of Python's multiprocessing."""
    return [name for name, has in samples[-1].held.items() if has.rss_mib > SMALL_MIB]


def _draw_held(
    panel: Axes, title: str, field: str, samples: Sequence[Sample], minutes: Sequence[float]
) -> None:
    for (colour, dashes), name in zip(LINES, _shown(samples), strict=True):
        values = [getattr(sample.held[name], field) for sample in samples]
        panel.plot(minutes, values, color=colour, linestyle=dashes, linewidth=1.5, label=name)
    panel.set_title(title)
    panel.set_ylim(bottom=0)


def _draw_files(panel: Axes, samples: Sequence[Sample], minutes: Sequence[float]) -> None:
    for (colour, dashes), name in zip(LINES, _shown(samples), strict=True):
        held = [sample.held[name] for sample in samples]
        values = [has.sockets + has.other_files for has in held]
        panel.plot(minutes, values, color=colour, linestyle=dashes, linewidth=1.5)
    panel.set_title("Open files, sockets among them")
    panel.set_ylim(bottom=0)


def _draw_latencies(panel: Axes, samples: Sequence[Sample], minutes: Sequence[float]) -> None:
    shown = [("infer_ms", "/infer/", "#0072B2"), ("live_ms", "/live/", "#D55E00")]
    for field, name, colour in shown:
        for percent, dashes in ((50, "-"), (99, ":")):
            values = [percentile(getattr(sample, field), percent) for sample in samples]
            label = f"{name} p{percent}"
            panel.plot(minutes, values, color=colour, linestyle=dashes, linewidth=1, label=label)
    panel.set(title="Latency, ms", yscale="log")
    panel.legend(ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.98), frameon=False)
