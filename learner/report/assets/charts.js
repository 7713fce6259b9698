"use strict";
// Draws each chart when it comes into view, in the colours of the theme.
(() => {
  const charts = JSON.parse(document.getElementById("charts-data").textContent);
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const drawn = new Set();

  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  // `rgb(1, 2, 3)` or `color(srgb ...)` with less of it to see.
  const faint = (name) => `color-mix(in srgb, ${colour(name)} 30%, ${colour("ground")})`;

  function resolved(value) {
    probe.style.color = value;
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = getComputedStyle(probe).color;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue] = canvas.getImageData(0, 0, 1, 1).data;
    return `rgb(${red}, ${green}, ${blue})`;
  }

  const isLimit = (trace) => trace.y.length === 2 && trace.y[0] === trace.y[1];

  function traceOf(chart, trace, places) {
    const own = `line-${trace.colour}`;
    const common = {
      name: trace.name,
      x: trace.x,
      y: trace.y,
      xaxis: "x",
      yaxis: trace.row === 1 ? "y" : `y${trace.row}`,
      legendgroup: trace.name,
    };
    if (trace.hover) common.customdata = trace.hover;
    if (trace.kind === "bar") {
      const value = "%{y:.4~g}";
      const beside = trace.hover ? " (%{customdata})" : "";
      return {
        ...common,
        type: "bar",
        marker: { color: resolved(colour(own)), line: { width: 0 } },
        hovertemplate: chart.whole ? `%{customdata}: ${value}<extra></extra>` : `${value}${beside}`,
      };
    }
    const smooth = trace.kind === "faint";
    return {
      ...common,
      type: "scatter",
      mode: trace.x.length < 25 && !isLimit(trace) ? "lines+markers" : "lines",
      connectgaps: false,
      showlegend: !smooth,
      hoverinfo: places.has(trace.name) && !smooth ? "skip" : "all",
      hovertemplate: places.has(trace.name) && !smooth ? undefined : "%{y:.4~g}",
      line: {
        color: smooth ? resolved(faint(own)) : resolved(colour(own)),
        width: smooth ? 1 : 2,
        dash: trace.dash,
      },
      marker: { size: 5, color: resolved(colour(own)) },
    };
  }

  function axis(title, more = {}) {
    const grid = resolved(colour("grid"));
    return {
      title: { text: title, font: { size: 12, color: resolved(colour("quiet")) }, standoff: 6 },
      gridcolor: grid,
      zerolinecolor: grid,
      linecolor: resolved(colour("rule")),
      tickfont: { size: 11, color: resolved(colour("quiet")) },
      automargin: true,
      ...more,
    };
  }

  const highest = (chart) => Math.max(...chart.traces.flatMap((trace) => trace.y.map(Number)));

  function layoutOf(chart) {
    const rows = chart.rows.length;
    const layout = {
      autosize: true,
      margin: { l: 54, r: 12, t: 8, b: 36 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: resolved(colour("ink")) },
      barmode: "stack",
      bargap: chart.whole ? 0.08 : 0.12,
      hovermode: chart.whole ? "closest" : "x unified",
      hoverlabel: {
        bgcolor: resolved(colour("raised")),
        bordercolor: resolved(colour("rule")),
        font: { size: 12, color: resolved(colour("ink")) },
      },
      legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", font: { size: 12 } },
      showlegend: new Set(chart.traces.map((trace) => trace.name)).size > 1,
      dragmode: "zoom",
      xaxis: axis(chart.x_title, { anchor: rows > 1 ? `y${rows}` : "y", zeroline: false }),
    };
    if (chart.whole && chart.traces[0].x.length < 16) layout.xaxis.tickvals = chart.traces[0].x;
    if (chart.whole && chart.traces[0].x.length < 16) layout.xaxis.ticktext = chart.traces[0].hover;
    const gap = 0.1;
    const height = (1 - gap * (rows - 1)) / rows;
    chart.rows.forEach((title, place) => {
      const top = 1 - place * (height + gap);
      const own = axis(title, { domain: [Math.max(0, top - height), top], rangemode: "tozero" });
      if (chart.log) Object.assign(own, { type: "log", dtick: 1, exponentformat: "power", rangemode: "normal" });
      if (chart.shares) Object.assign(own, { tickformat: ".0%" }, highest(chart) > 0.4 ? { range: [0, 1.02] } : {});
      if (chart.slug.startsWith("loss") || chart.slug === "coordinates") own.rangemode = "normal";
      layout[place ? `yaxis${place + 1}` : "yaxis"] = own;
    });
    return layout;
  }

  function draw(element) {
    const chart = charts[element.dataset.chart];
    const faintOnes = new Set(
      chart.traces.filter((trace) => trace.kind === "faint").map((trace) => trace.name));
    const traces = chart.traces.map((trace) => traceOf(chart, trace, faintOnes));
    const options = {
      responsive: true,
      displaylogo: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: chart.slug, scale: 2 },
    };
    drawn.add(element);
    return Plotly.react(element, traces, layoutOf(chart), options);
  }

  const all = () => [...document.querySelectorAll("[data-chart]")];
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "300px" });
  all().forEach((element) => seen.observe(element));
  document.addEventListener("theme", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => all().filter((element) => !drawn.has(element)).forEach(draw));
})();
