"use strict";
// The gallery: cards, filters, which boxes are shown, and one answer at a time in a dialog.
// Whatever comes from an answer is put into the page as text, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("gallery-data").textContent);
  if (!data.cards.length) return;

  const PAGE = 30;
  const SVG = "http://www.w3.org/2000/svg";
  const gallery = document.getElementById("gallery");
  const tools = document.getElementById("tools");
  const list = document.getElementById("cards");
  const dialog = document.getElementById("detail");
  const tip = document.getElementById("tip");
  const roleNames = Object.keys(data.roles);
  // Of a small picture so many boxes have their descriptions on them, wrong ones first.
  const TAGS = 12;
  const hidden = new Set();
  let shown = [];
  let room = PAGE;
  let open = null;

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function draw(tag, attributes) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  // ---- pictures -------------------------------------------------------------------------

  const outline = (item) => {
    const [x1, y1, x2, y2] = item.coords;
    return item.kind === "bbox_2d" ? [x1, y1, x2, y1, x2, y2, x1, y2] : item.coords;
  };

  function extent(item) {
    const xs = item.coords.filter((_, place) => place % 2 === 0);
    const ys = item.coords.filter((_, place) => place % 2 === 1);
    return (Math.max(...xs) - Math.min(...xs)) * (Math.max(...ys) - Math.min(...ys));
  }

  // Bins are the units of the drawing, and 999 is the right or lower edge of the image.
  function drawing(card) {
    const svg = draw("svg", { viewBox: "0 0 999 999", preserveAspectRatio: "none" });
    svg.setAttribute("aria-hidden", "true");
    const order = card.objects.map((_, place) => place);
    order.sort((a, b) => extent(card.objects[b]) - extent(card.objects[a]));
    for (const place of order) {
      const item = card.objects[place];
      const group = draw("g", { class: `shape ${item.role}`, "data-place": place });
      const points = outline(item).join(" ");
      group.append(draw("polygon", { class: "halo", points }));
      group.append(draw("polygon", { class: "line", points }));
      svg.append(group);
    }
    return svg;
  }

  const partnerOf = (card, item) => (item.pair === null ? null : card.objects[item.pair]);

  function differs(card, item) {
    const partner = partnerOf(card, item);
    return partner !== null && partner.desc.normalize() !== item.desc.normalize();
  }

  // The description of a box, above a prediction and below a ground truth, within the picture. Of a
  // pair of the same description it stands on the prediction alone, while that is shown.
  function tag(card, item) {
    const points = outline(item);
    const xs = points.filter((_, place) => place % 2 === 0).map((x) => x / 9.99);
    const ys = points.filter((_, place) => place % 2 === 1).map((y) => y / 9.99);
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    const twin = item.role === "truth" && !differs(card, item) ? " twin" : "";
    const element = make("span", { class: `tag ${item.role}${twin}`, dir: "auto" }, item.desc);
    if (left + right < 100) Object.assign(element.style, { left: `${left}%`, maxWidth: `${100 - left}%` });
    else Object.assign(element.style, { right: `${100 - right}%`, maxWidth: `${right}%` });
    const below = !["match", "stray", "unjudged", "removed"].includes(item.role);
    element.style.top = below
      ? `min(${Math.max(...ys)}%, 100% - 1.3em)`
      : `max(0px, ${Math.min(...ys)}% - 1.3em)`;
    return element;
  }

  function tags(card, most) {
    const wrong = (item) => item.pair === null || differs(card, item);
    const first = [...card.objects].sort((a, b) => wrong(b) - wrong(a));
    const holder = make("span", { class: "tags", "aria-hidden": "true" });
    holder.append(...first.slice(0, most).map((item) => tag(card, item)));
    return holder;
  }

  function shot(card, mostTags = Infinity) {
    const picture = data.pictures[card.picture];
    const frame = make("div", { class: "shot" });
    const [width, height] = picture.src ? [picture.width, picture.height] : [card.width, card.height];
    frame.style.aspectRatio = `${width} / ${height}`;
    frame.style.setProperty("--ratio", width / height);
    frame.classList.toggle("tall", height > width);
    if (picture.src) {
      const image = make("img", { src: picture.src, alt: "", width, height, decoding: "async" });
      if (Math.max(width, height) < 256) image.className = "pixels";
      frame.append(image);
    } else {
      frame.append(make("p", { class: "lost" }, picture.problem));
    }
    frame.append(drawing(card), tags(card, mostTags));
    return frame;
  }

  const percent = (part) => `${(100 * part).toFixed(part === 1 || part === 0 ? 0 : 1)} %`;
  const numbers = (item) => `[${item.coords.join(", ")}]`;

  // ---- cards ----------------------------------------------------------------------------

  const chips = (card) =>
    make("span", { class: "chips" },
      ...card.faults.map((name) => make("span", { class: `chip ${name}`, title: data.faults[name][1] },
        label(name, card))));

  function label(name, card) {
    if (name === "dropped") return `${card.dropped.length} dropped`;
    if (name === "missed") return `${card.missed} missed`;
    if (name === "false_positive") {
      const strays = card.objects.filter((item) => item.role === "stray").length;
      return strays === 1 ? "1 false positive" : `${strays} false positives`;
    }
    return data.faults[name][0];
  }

  function cardOf(card) {
    const told = `F1 ${card.f1.toFixed(2)}`;
    const where = card.step === null ? "" : `step ${card.step}`;
    const link = make("a", { href: `#${card.slug}`, class: "open" },
      make("span", { class: "stage" }, shot(card, TAGS)),
      make("span", { class: "caption" },
        make("b", {}, told), " ", make("span", {}, where)),
      make("span", { class: "name", title: card.sample_id }, make("bdi", {}, card.name)),
      chips(card));
    return make("li", { id: card.slug }, link);
  }

  // ---- filters --------------------------------------------------------------------------

  const searched = data.cards.map((card) =>
    [card.sample_id, ...card.objects.map((item) => item.desc)].join("\n").toLowerCase());

  const orders = {
    worst: () => 0,
    step: (a, b) => a.step - b.step,
    sample: (a, b) => a.sample_id.localeCompare(b.sample_id, undefined, { numeric: true }),
  };

  function passing() {
    const step = tools.step.value;
    const fault = tools.fault.value;
    const words = tools.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.cards.filter((card, place) =>
      (step === "" || String(card.step) === step) &&
      (fault === "" || (fault === "none" ? !card.faults.length : card.faults.includes(fault))) &&
      words.every((word) => searched[place].includes(word)));
    return found.sort(orders[tools.order.value]);
  }

  function filter() {
    shown = passing();
    room = PAGE;
    list.replaceChildren();
    fill();
  }

  function fill() {
    list.append(...shown.slice(list.children.length, room).map(cardOf));
    const count = Math.min(room, shown.length);
    const found = `${shown.length} of the ${data.cards.length} answers here`;
    document.getElementById("count").textContent =
      shown.length === 0 ? "No answer here is like that." : `${count} shown, ${found} fit.`;
    document.getElementById("more").hidden = count === shown.length;
  }

  function counted(select, all, entries) {
    select.append(make("option", { value: "" }, `${all} (${data.cards.length})`));
    for (const [value, text, count] of entries) {
      if (count) select.append(make("option", { value }, `${text} (${count})`));
    }
  }

  function fillFilters() {
    const steps = new Map();
    for (const card of data.cards) steps.set(card.step, (steps.get(card.step) ?? 0) + 1);
    const ordered = [...steps].sort((a, b) => a[0] - b[0]);
    counted(tools.step, "all", ordered.map(([step, count]) => [step, step, count]));
    document.getElementById("step-filter").hidden = ordered.length < 2;
    const having = (name) => data.cards.filter((card) => card.faults.includes(name)).length;
    const faults = Object.entries(data.faults).map(([name, [text]]) => [name, text, having(name)]);
    const clean = data.cards.filter((card) => !card.faults.length).length;
    counted(tools.fault, "any", [...faults, ["none", "no fault", clean]]);
  }

  // ---- legend ---------------------------------------------------------------------------

  function swatch(role) {
    const svg = draw("svg", { viewBox: "0 0 30 12", class: "swatch", "aria-hidden": "true" });
    const group = draw("g", { class: `shape ${role}` });
    for (const part of ["halo", "line"]) group.append(draw("path", { class: part, d: "M2 6H28" }));
    svg.append(group);
    return svg;
  }

  function legend(into) {
    for (const role of roleNames) {
      const count = data.cards.reduce(
        (sum, card) => sum + card.objects.filter((item) => item.role === role).length, 0);
      if (!count) continue;
      const box = make("input", { type: "checkbox", "data-role": role });
      box.checked = !hidden.has(role);
      const [text, meaning] = data.roles[role];
      into.append(make("label", { title: meaning }, box, swatch(role), text));
    }
    const names = make("input", { type: "checkbox", "data-role": "tags" });
    names.checked = !hidden.has("tags");
    into.append(make("label", { title: "on the boxes" }, names, "descriptions"));
  }

  function toggle(event) {
    const role = event.target.dataset?.role;
    if (!role) return;
    if (event.target.checked) hidden.delete(role);
    else hidden.add(role);
    for (const holder of [gallery, dialog]) {
      for (const name of [...roleNames, "tags"]) holder.classList.toggle(`hide-${name}`, hidden.has(name));
    }
    for (const box of document.querySelectorAll(`input[data-role="${role}"]`)) {
      box.checked = !hidden.has(role);
    }
  }

  // ---- one answer -----------------------------------------------------------------------

  const under = (text) => make("span", { class: "under", dir: "auto" }, text);

  function objectRow(card, place) {
    const item = card.objects[place];
    const partner = partnerOf(card, item);
    return make("tr", { "data-place": place, tabindex: "0", class: item.role },
      make("td", {}, swatch(item.role),
        make("bdi", { class: differs(card, item) ? "differs" : "" }, item.desc),
        under(`${data.roles[item.role][0]}: ${item.key}`)),
      make("td", {}, item.iou === null ? "–" : item.iou.toFixed(3),
        partner === null ? "" : under(`with ${partner.key}`)),
      make("td", { class: "bins" }, numbers(item)));
  }

  function objectTable(card) {
    if (!card.objects.length) return make("p", {}, "No object was predicted, and none is annotated.");
    return make("table", { class: "objects" },
      make("thead", {}, make("tr", {},
        ...["object", "IoU", "bins"].map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...card.objects.map((_, place) => objectRow(card, place))));
  }

  // What stands between backticks as code.
  const withCode = (text) =>
    text.split("`").map((part, place) => (place % 2 ? make("code", {}, part) : part));

  function droppedList(card) {
    const items = card.dropped.map(([key, reason]) =>
      make("li", {}, make("code", { dir: "auto" }, key), " ", make("b", {}, reason),
        " – ", ...withCode(data.drops[reason] ?? "")));
    return make("div", {}, make("h4", {}, "Dropped by the parser"), make("ul", {}, ...items));
  }

  // The keys that were dropped are marked where they stand first.
  function answerText(card) {
    const text = make("pre", { dir: "auto", tabindex: "0", class: "answer" });
    let rest = card.text;
    for (const [key, reason] of card.dropped) {
      const quoted = JSON.stringify(key);
      const at = rest.indexOf(quoted);
      if (at < 0) continue;
      text.append(rest.slice(0, at), make("mark", { title: reason }, quoted));
      rest = rest.slice(at + quoted.length);
    }
    text.append(rest || (text.childNodes.length ? "" : "(empty)"));
    return text;
  }

  function facts(card) {
    const [begun, ended] = card.version;
    const file = card.images > 1 ? `${card.file} and ${card.images - 1} more` : card.file;
    const entries = [
      ["sample", card.sample_id],
      ["image", `${file}, ${card.width} × ${card.height}`],
      ["ended by", card.finish],
      ["length", `${card.tokens} tokens`],
      ["seed", card.seed ?? "none"],
      ["weights", begun === ended ? `version ${begun}` : `version ${begun}, at the end ${ended}`],
      ["objects", `${card.predicted} predicted, ${card.truths} annotated, ${card.hits} hits`],
    ];
    if (card.left_out) entries.push(["not trained on", card.left_out]);
    if (card.step !== null) {
      const rank = card.rank ? `, learner process ${card.rank}` : "";
      entries.unshift(["step", `${card.step}${rank}`]);
    }
    return make("dl", { class: "facts" }, ...entries.map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", { dir: "auto" }, String(value)))));
  }

  function replay(card) {
    if (!data.replay || !card.replay) return "";
    return make("div", {}, make("h4", {}, "Build this step again, and tell all of this answer"),
      make("pre", { tabindex: "0" }, `${data.replay} ${card.replay}`));
  }

  function show(card) {
    open = card;
    document.getElementById("detail-title").textContent =
      `F1 ${card.f1.toFixed(2)} – ${card.name}${card.step === null ? "" : `, step ${card.step}`}`;
    const boxes = make("div", { class: "legend" });
    legend(boxes);
    dialog.querySelector(".body").replaceChildren(
      make("div", { class: "look" }, make("div", { class: "stage" }, shot(card)), boxes, chips(card)),
      make("div", { class: "read" },
        objectTable(card),
        card.dropped.length ? droppedList(card) : "",
        make("h4", {}, "Answer"), answerText(card), facts(card), replay(card)));
    dialog.querySelector(".body").scrollTop = 0;
    turns();
    if (!dialog.open) dialog.showModal();
  }

  function turns() {
    const place = shown.indexOf(open);
    document.getElementById("previous").disabled = place <= 0;
    document.getElementById("next").disabled = place < 0 || place === shown.length - 1;
  }

  function turn(by) {
    const next = shown[shown.indexOf(open) + by];
    if (shown.includes(open) && next) location.replace(`#${next.slug}`);
  }

  const slugOf = () => {
    try {
      return decodeURIComponent(location.hash.slice(1));
    } catch (malformed) {
      return "";
    }
  };

  function followLink() {
    const card = data.cards.find((each) => each.slug === slugOf());
    if (card) show(card);
    else if (dialog.open) dialog.close();
  }

  // Back to the card it was opened from, with an address that opens nothing again.
  function closed() {
    hint(null);
    if (!open) return;
    const place = shown.indexOf(open);
    if (place >= room) {
      room = place + 1;
      fill();
    }
    history.replaceState(null, "", "#gallery");
    document.getElementById(open.slug)?.querySelector("a").focus();
    open = null;
  }

  // ---- what a shape is ------------------------------------------------------------------

  function mark(holder, place) {
    const item = open && place !== null ? open.objects[place] : null;
    for (const element of holder.querySelectorAll("[data-place]")) {
      const own = Number(element.dataset.place);
      const lit = item !== null && (own === Number(place) || own === item.pair);
      element.classList.toggle("lit", lit);
    }
    holder.classList.toggle("marking", item !== null);
  }

  function hint(item, event) {
    tip.hidden = item === null;
    if (item === null) return;
    const lines = [item.desc, data.roles[item.role][0], `${item.key} ${numbers(item)}`];
    if (item.iou !== null) lines.push(`IoU ${item.iou.toFixed(3)}`);
    if (item.confidence !== null) lines.push(`confidence ${item.confidence.toFixed(3)}`);
    tip.replaceChildren(...lines.map((line, place) => make(place ? "span" : "b", { dir: "auto" }, line)));
    (dialog.open ? dialog : document.body).append(tip);
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  }

  function pointed(event) {
    const shape = event.target.closest?.("svg .shape[data-place]");
    if (!shape) return hint(null);
    const slug = shape.closest("li")?.id;
    const card = slug ? data.cards.find((each) => each.slug === slug) : open;
    return card ? hint(card.objects[shape.dataset.place], event) : hint(null);
  }

  function inDialog(event) {
    const element = event.target.closest?.("[data-place]");
    mark(dialog, element ? element.dataset.place : null);
  }

  // ---- start ----------------------------------------------------------------------------

  fillFilters();
  legend(tools.querySelector("fieldset"));
  filter();
  tools.addEventListener("input", (event) => (event.target.dataset.role ? toggle(event) : filter()));
  tools.addEventListener("submit", (event) => event.preventDefault());
  dialog.addEventListener("input", toggle);
  dialog.addEventListener("close", closed);
  dialog.addEventListener("click", (event) => (event.target === dialog ? dialog.close() : inDialog(event)));
  for (const name of ["pointerover", "focusin"]) dialog.addEventListener(name, inDialog);
  dialog.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select")) return;
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
  document.addEventListener("pointermove", pointed);
  document.getElementById("previous").addEventListener("click", () => turn(-1));
  document.getElementById("next").addEventListener("click", () => turn(1));
  document.getElementById("close").addEventListener("click", () => dialog.close());
  document.getElementById("more").addEventListener("click", () => {
    room += PAGE;
    fill();
  });
  addEventListener("hashchange", followLink);
  followLink();
})();
