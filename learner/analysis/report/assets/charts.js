"use strict";
// Draws each plot with Plotly when it comes into view, in the colours of the page.
(() => {
  const plots = JSON.parse(document.getElementById("plots-data").textContent);
  const waiting = new Set(document.querySelectorAll("[data-plot]"));
  const drawn = new Set();
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;

  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  function traces(line, place) {
    const style = { color: colour(`line-${(place % 8) + 1}`), dash: place < 8 ? "solid" : "dot" };
    const common = { name: line.name, legendgroup: line.name, hovertemplate: "%{y:.4~g}" };
    const mode = line.x.length < 25 ? "lines+markers" : "lines";
    if (!line.mean) return [{ ...common, x: line.x, y: line.y, mode, line: style }];
    return [
      { ...common, x: line.x, y: line.y, mode, line: { ...style, width: 1 }, opacity: 0.3, showlegend: false },
      { ...common, ...line.mean, mode, line: style, hoverinfo: "skip", hovertemplate: undefined },
    ];
  }

  function draw(element) {
    const plot = plots[element.dataset.plot];
    const axis = { gridcolor: colour("rule"), linecolor: colour("rule"), zerolinecolor: colour("rule"), automargin: true };
    const flat = new Set(plot.lines.flatMap((line) => line.y)).size === 1;
    const hoverlabel = { bgcolor: colour("raised"), bordercolor: colour("rule") };
    Plotly.react(element, plot.lines.flatMap(traces), {
      margin: { l: 54, r: 12, t: 8, b: 36 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", size: 11, color: colour("ink") },
      hovermode: "x unified",
      hoverlabel,
      showlegend: plot.lines.length > 1,
      legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom" },
      xaxis: { ...axis, title: { text: "step" } },
      yaxis: { ...axis, title: { text: plot.unit }, type: plot.log ? "log" : "linear", exponentformat: "e", rangemode: flat ? "tozero" : "normal" },
    }, { responsive: true, displaylogo: false });
    waiting.delete(element);
    drawn.add(element);
  }

  const seen = new IntersectionObserver(
    (entries) => entries.filter((each) => each.isIntersecting && waiting.has(each.target))
      .forEach((each) => draw(each.target)),
    { rootMargin: "300px" });
  waiting.forEach((element) => seen.observe(element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => waiting.forEach(draw));
})();
