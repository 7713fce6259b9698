"use strict";
// The gallery: cards, filters, which boxes are shown, and one answer at a time in a dialog.
// Whatever comes from an answer is put into the page as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("gallery-data").textContent);
  if (!data.cards.length) return;

  const [gallery, tools, list, dialog] =
    ["gallery", "tools", "cards", "detail"].map((id) => document.getElementById(id));
  const roleNames = Object.keys(data.roles);
  const hidden = new Set();
  let shown = [];
  let open = null;

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  // ---- pictures -------------------------------------------------------------------------

  function outline(item) {
    const [x1, y1, x2, y2] = item.coords;
    return item.kind === "bbox_2d" ? [x1, y1, x2, y1, x2, y2, x1, y2] : item.coords;
  }

  function bounds(item) {
    const [xs, ys] = [0, 1].map((odd) => item.coords.filter((_, place) => place % 2 === odd));
    return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
  }

  function area(item) {
    const { left, right, top, bottom } = bounds(item);
    return (right - left) * (bottom - top);
  }

  function facts(item) {
    const lines = [item.desc, data.roles[item.role][0], `${item.key} [${item.coords.join(", ")}]`];
    if (item.iou !== null) lines.push(`IoU ${item.iou.toFixed(3)}`);
    if (item.confidence !== null) lines.push(`confidence ${item.confidence.toFixed(3)}`);
    return lines.join("\n");
  }

  // Bins are the units of the drawing, and 999 is the right or lower edge of the image.
  function shape(item, place) {
    const points = outline(item).join(" ");
    return draw("g", { class: `shape ${item.role}`, "data-place": place },
      draw("polygon", { class: "halo", points }),
      draw("polygon", { class: "line", points }, draw("title", {}, facts(item))));
  }

  const partnerOf = (card, item) => (item.pair === null ? null : card.objects[item.pair]);

  function differs(card, item) {
    const partner = partnerOf(card, item);
    return partner !== null && partner.desc !== item.desc;
  }

  // The description of a box, above a prediction and below a ground truth; of a matched pair of one
  // description, above the prediction alone.
  function tag(card, item) {
    const { left, right, top, bottom } = bounds(item);
    const below = ["truth", "missed", "appended"].includes(item.role);
    const twin = item.role === "truth" && !differs(card, item) ? " twin" : "";
    const element = make("span", { class: `tag ${item.role}${twin}`, dir: "auto" }, item.desc);
    if (left + right < 999) element.style.left = `${left / 9.99}%`;
    else element.style.right = `${100 - right / 9.99}%`;
    element.style.top = below ? `min(${bottom / 9.99}%, 100% - 1.3em)` : `max(0px, ${top / 9.99}% - 1.3em)`;
    return element;
  }

  function shot(card) {
    const picture = data.pictures[card.picture];
    const [width, height] = picture.src ? [picture.width, picture.height] : [card.width, card.height];
    const order = card.objects.map((_, place) => place);
    order.sort((a, b) => area(card.objects[b]) - area(card.objects[a]));
    const frame = make("div", { class: height > width ? "shot tall" : "shot" },
      picture.src
        ? make("img", { src: picture.src, alt: "", class: width < 256 ? "pixels" : "" })
        : make("p", { class: "lost" }, picture.problem),
      draw("svg", { viewBox: "0 0 999 999", preserveAspectRatio: "none" },
        ...order.map((place) => shape(card.objects[place], place))),
      make("span", { class: "tags", "aria-hidden": "true" }, ...card.objects.map((item) => tag(card, item))));
    frame.style.aspectRatio = `${width} / ${height}`;
    frame.style.setProperty("--ratio", width / height);
    return make("div", { class: "stage" }, frame);
  }

  // ---- cards and filters ----------------------------------------------------------------

  const chips = (card) =>
    make("span", { class: "chips" }, ...card.faults.map((fault) => make("span", { class: "chip" }, fault)));

  const cardOf = (card) => make("li", { id: card.slug },
    make("a", { href: `#${card.slug}`, class: "open" },
      shot(card),
      make("b", {}, `F1 ${card.f1.toFixed(2)}`), card.step === null ? "" : ` step ${card.step}`,
      make("bdi", { class: "name" }, card.name),
      chips(card)));

  const searched = data.cards.map((card) =>
    [card.facts.sample, ...card.objects.map((item) => item.desc)].join("\n").toLowerCase());

  function filter() {
    const [step, fault] = [tools.step.value, tools.fault.value];
    const words = tools.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = data.cards.filter((card, place) =>
      (step === "" || String(card.step) === step) &&
      (fault === "" || card.faults.includes(fault)) &&
      words.every((word) => searched[place].includes(word)));
    list.replaceChildren(...shown.map(cardOf));
    document.getElementById("count").textContent =
      `${shown.length} of the ${data.cards.length} answers here fit.`;
  }

  function fillFilter(select, all, values, has) {
    select.append(make("option", { value: "" }, `${all} (${data.cards.length})`));
    for (const value of values) {
      const count = data.cards.filter((card) => has(card, value)).length;
      if (count) select.append(make("option", { value }, `${value} (${count})`));
    }
    select.parentElement.hidden = select.options.length < 2;
  }

  function fillFilters() {
    const steps = [...new Set(data.cards.map((card) => card.step))].sort((a, b) => a - b);
    fillFilter(tools.step, "all", steps.filter((step) => step !== null), (card, step) => card.step === step);
    fillFilter(tools.fault, "any", data.faults, (card, fault) => card.faults.includes(fault));
  }

  // ---- legend: which boxes are shown ----------------------------------------------------

  const swatch = (role) => draw("svg", { viewBox: "0 0 30 12", class: "swatch" },
    draw("g", { class: `shape ${role}` },
      draw("path", { class: "halo", d: "M2 6H28" }), draw("path", { class: "line", d: "M2 6H28" })));

  function legend(into) {
    const present = new Set(data.cards.flatMap((card) => card.objects.map((item) => item.role)));
    const entry = (role, [text, meaning], ...drawn) => {
      const box = make("input", { type: "checkbox", "data-role": role });
      box.checked = !hidden.has(role);
      return make("label", { title: meaning }, box, ...drawn, text);
    };
    into.append(
      ...roleNames.filter((role) => present.has(role)).map((role) => entry(role, data.roles[role], swatch(role))),
      entry("tags", ["descriptions", "on the boxes"]));
    return into;
  }

  function toggle({ target }) {
    const role = target.dataset.role;
    if (!role) return;
    if (target.checked) hidden.delete(role);
    else hidden.add(role);
    for (const holder of [gallery, dialog]) holder.classList.toggle(`hide-${role}`, hidden.has(role));
    for (const box of document.querySelectorAll(`input[data-role="${role}"]`)) box.checked = target.checked;
  }

  // ---- one answer -----------------------------------------------------------------------

  const under = (text) => make("span", { class: "under", dir: "auto" }, text);

  function objectRow(card, item, place) {
    const partner = partnerOf(card, item);
    return make("tr", { "data-place": place, tabindex: "0" },
      make("td", {}, swatch(item.role), make("bdi", { class: differs(card, item) ? "differs" : "" }, item.desc),
        under(`${data.roles[item.role][0]}: ${item.key}`)),
      make("td", {}, item.iou === null ? "–" : item.iou.toFixed(3), partner ? under(`with ${partner.key}`) : ""),
      make("td", {}, `[${item.coords.join(", ")}]`));
  }

  function described(card) {
    const heads = ["object", "IoU", "bins"].map((head) => make("th", { scope: "col" }, head));
    const dropped = card.dropped.map(([key, reason]) => make("li", {},
      make("code", { dir: "auto" }, key), ` ${reason}: ${data.drops[reason] ?? ""}`));
    const facts = Object.entries(card.facts).map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", { dir: "auto" }, value)));
    return make("div", { class: "read" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)),
        make("tbody", {}, ...card.objects.map((item, place) => objectRow(card, item, place)))),
      ...(dropped.length ? [make("h4", {}, "Dropped by the parser"), make("ul", {}, ...dropped)] : []),
      make("h4", {}, "Answer"),
      make("pre", { dir: "auto", tabindex: "0", class: "answer" }, card.text || "(empty)"),
      make("dl", { class: "facts" }, ...facts),
      ...(data.replay ? [make("h4", {}, "Replay"), make("pre", {}, `${data.replay} ${card.replay}`)] : []));
  }

  function show(card) {
    open = card;
    const step = card.step === null ? "" : `, step ${card.step}`;
    document.getElementById("detail-title").textContent = `F1 ${card.f1.toFixed(2)} – ${card.name}${step}`;
    const look = make("div", { class: "look" }, shot(card), legend(make("div", { class: "legend" })), chips(card));
    dialog.querySelector(".body").replaceChildren(look, described(card));
    const place = shown.indexOf(card);
    document.getElementById("previous").disabled = place <= 0;
    document.getElementById("next").disabled = place < 0 || place === shown.length - 1;
    if (!dialog.open) dialog.showModal();
  }

  function turn(by) {
    const next = shown[shown.indexOf(open) + by];
    if (shown.includes(open) && next) location.replace(`#${next.slug}`);
  }

  function followLink() {
    const anchor = location.hash.slice(1);
    const card = data.cards.find((each) => each.slug === anchor);
    if (card) show(card);
    else if (dialog.open) dialog.close();
  }

  // Back to the card of the answer, with an address that opens nothing again.
  function closed() {
    history.replaceState(null, "", "#gallery");
    document.getElementById(open.slug)?.querySelector("a").focus();
    open = null;
  }

  // An object and its partner are lit in the picture and in the table.
  function mark({ target }) {
    const place = target.closest("[data-place]")?.dataset.place;
    const item = open && place !== undefined ? open.objects[place] : null;
    for (const element of dialog.querySelectorAll("[data-place]")) {
      const own = Number(element.dataset.place);
      element.classList.toggle("lit", item !== null && (own === Number(place) || own === item.pair));
    }
    dialog.classList.toggle("marking", item !== null);
  }

  fillFilters();
  legend(tools.querySelector("fieldset"));
  filter();
  tools.addEventListener("input", (event) => (event.target.dataset.role ? toggle(event) : filter()));
  tools.addEventListener("submit", (event) => event.preventDefault());
  dialog.addEventListener("input", toggle);
  dialog.addEventListener("close", closed);
  dialog.addEventListener("pointerover", mark);
  dialog.addEventListener("focusin", mark);
  dialog.addEventListener("keydown", ({ key }) => turn({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0));
  document.getElementById("previous").addEventListener("click", () => turn(-1));
  document.getElementById("next").addEventListener("click", () => turn(1));
  document.getElementById("close").addEventListener("click", () => dialog.close());
  addEventListener("hashchange", followLink);
  followLink();
})();
