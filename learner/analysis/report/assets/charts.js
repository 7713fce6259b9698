"use strict";
// Draws each chart when it comes into view, in the colours that the theme gives the page.
(() => {
  const text = document.getElementById("charts-data").textContent;
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  function inTheme(key, value) {
    if (!key.endsWith("color")) return value;
    probe.style.color = value;
    return getComputedStyle(probe).color;
  }
  let figures = JSON.parse(text, inTheme);
  const waiting = new Set(document.querySelectorAll("[data-chart]"));
  const drawn = new Set();
  function draw(element) {
    waiting.delete(element);
    drawn.add(element);
    Plotly.react(element, figures[element.dataset.chart]);
  }
  const seen = new IntersectionObserver(
    (entries) => entries.filter((each) => each.isIntersecting && waiting.has(each.target))
      .forEach((each) => draw(each.target)),
    { rootMargin: "300px" });
  waiting.forEach((element) => seen.observe(element));
  document.addEventListener("theme", () => {
    figures = JSON.parse(text, inTheme);
    drawn.forEach(draw);
  });
  addEventListener("beforeprint", () => waiting.forEach(draw));
})();
