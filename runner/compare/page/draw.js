// SVG: elements, scales, axes, colours. Colours of text and lines are the style sheet's, so that they follow dark and print.

// Okabe and Ito's colours, which the colour-blind can tell apart; dashes and shapes repeat what they say.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4"];
const RAMP = ["#31508c", "#2a7f9e", "#35a583", "#8cbf4a", "#e3c22f"];  // cool and low to warm and high
const LETTER = 6.4;  // width of a letter in px
const at = (list, i) => list[i % list.length];
let paper = false;  // while it is printed

/** An element below another; texts are text, never markup. */
function add(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(parent.namespaceURI.endsWith("svg") || name === "svg" ? "http://www.w3.org/2000/svg" : parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  parent.append(element);
  return element;
}

/** An empty drawing in a figure, as wide as that. */
function canvas(id, height) {
  const box = byId(id).lastElementChild;
  const width = paper ? (byId(id).classList.contains("full") ? 1000 : 490) : Math.max(box.clientWidth, 240);
  box.replaceChildren();
  const svg = add(box, "svg", { role: "img" });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { box, svg, width };
}

/** A mark that stands for a row: clicking it emphasises the row, pointing at it says what it is. */
function mark(parent, name, i, attributes, about = "") {
  const kind = `${attributes.class ?? ""} mark${selection.picked.has(i) ? " picked" : ""}`;
  const element = add(parent, name, { ...attributes, class: kind, "data-row": i });
  add(element, "title", {}, `${i + 1}: ${rows[i].name}${about && `\n${about}`}`);
  return element;
}

const write = (svg, x, y, text, attributes = {}) => add(svg, "text", { x, y, ...attributes }, text);
const cut = (text, room) => text.length * LETTER <= room ? text : `${text.slice(0, Math.max(1, Math.floor(room / LETTER) - 1))}\u2026`;

/** A number for an axis; a setting stands as one types it. */
function brief(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e") : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function ticks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => (high - low) / size <= most) ?? 10 * power;
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, i) => Number(((Math.ceil(low / step - 1e-9) + i) * step).toPrecision(12)));
}

/** Numbers -> pixels: `at(value)`, and `ticks`. */
function linear(values, from, to, { every = 70, pad = 0.05 } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * pad || Math.abs(high) * 0.05 || 1;
  if (high === low || pad) [low, high] = [low >= 0 && low < margin ? 0 : low - margin, high + margin];
  const place = (value) => from + (to - from) * (value - low) / (high - low);
  return { at: place, ticks: ticks(low, high, Math.max(2, Math.abs(to - from) / every)).map((value) => [value, brief(value)]), value: (pixel) => low + (pixel - from) / (to - from) * (high - low) };
}

/** Numbers of several magnitudes -> pixels. */
function logarithmic(values, from, to, shown) {
  const inner = linear(values.map(Math.log2), from, to, { pad: 0.04 });
  return { at: (value) => inner.at(Math.log2(value)), ticks: shown.map((value) => [value, brief(value)]) };
}

/** Values of a setting, evenly spaced -> pixels. */
function ordinal(values, from, to) {
  const all = distinct(values), step = (to - from) / all.length;
  return { at: (value) => from + step * (all.indexOf(value) + 0.5), ticks: all.map((value) => [value, `${value}`]), step: Math.abs(step) };
}

/** Values, each once: numbers by size, before texts as they come. */
const distinct = (values) => [...new Set(values)].sort((a, b) => typeof a === "number" && typeof b === "number" ? a - b : (typeof b === "number") - (typeof a === "number"));

/** The scale that suits a name: few values of a setting stand apart, many numbers along a line. */
function scaleOf(name, members, from, to) {
  const values = members.map((i) => valueOf(i, name));
  const along = values.length && (figureOf(name) || (values.every((value) => typeof value === "number") && new Set(values).size > 12));
  return along ? linear(values, from, to) : ordinal(values, from, to);
}

const titleOf = (name) => { const figure = figureOf(name); return figure ? figure.title + (figure.unit && `, ${figure.unit}`) : name; };

/** Axes of a plot whose corners are left, right, top and bottom, with lines across it. */
function axes(svg, { left, right, top, bottom }, x, y, xTitle = "", yTitle = "") {
  for (const [value, text] of x?.ticks ?? []) {
    add(svg, "line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: top, y2: bottom });
    const label = write(svg, x.at(value), bottom + 14, cut(text, x.step ?? 70), { "text-anchor": "middle" });
    add(label, "title", {}, text);
  }
  for (const [value, text] of y?.ticks ?? []) {
    add(svg, "line", { class: "grid", x1: left, x2: right, y1: y.at(value), y2: y.at(value) });
    add(write(svg, left - 6, y.at(value) + 4, cut(text, left - 8), { "text-anchor": "end" }), "title", {}, text);
  }
  write(svg, right, bottom + 30, xTitle, { "text-anchor": "end", class: "axis" });
  write(svg, 2, top - 8, yTitle, { class: "axis" });
}

/** Colours by a name: `of(row)`, and what they mean as [text, colour, number] for a legend. */
function coloursBy(name, members) {
  const known = members.filter((i) => valueOf(i, name) !== null), values = distinct(known.map((i) => valueOf(i, name)));
  const all = distinct(rows.map((_, i) => valueOf(i, name)));  // a value keeps its colour whatever is selected
  const along = figureOf(name) || (values.length > COLOURS.length && values.every((value) => typeof value === "number"));
  if (!along) {
    const place = (i) => all.indexOf(valueOf(i, name)), shown = all.filter((value) => values.includes(value));
    return { of: (i) => at(COLOURS, place(i)), shape: place, legend: shown.map((value) => [`${value}`, at(COLOURS, all.indexOf(value)), all.indexOf(value)]) };
  }
  const low = Math.min(...values), high = Math.max(...values), share = (value) => high > low ? (value - low) / (high - low) : 1;
  return { of: (i) => known.includes(i) ? ramp(share(valueOf(i, name))) : "#8C8C8C", shape: () => 0, legend: values.length ? [low, (low + high) / 2, high].map((value) => [brief(value), ramp(share(value)), 0]) : [] };
}

/** A colour of the ramp, from 0 to 1. */
function ramp(share) {
  const place = share * (RAMP.length - 1), n = Math.min(Math.floor(place), RAMP.length - 2);
  const parts = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)), [a, b] = [parts(RAMP[n]), parts(RAMP[n + 1])];
  return `rgb(${a.map((part, k) => Math.round(part + (b[k] - part) * (place - n))).join(" ")})`;
}

/** Black or white, whichever is read better on a colour of the ramp. */
const onTop = (colour) => { const [r, g, b] = colour.match(/\d+/g).map(Number); return 0.3 * r + 0.6 * g + 0.1 * b > 120 ? "black" : "white"; };

/** The outline of a point: circle, square, diamond, triangle. */
function shape(n, x, y, r) {
  const corners = [[[-1, -1], [1, -1], [1, 1], [-1, 1]], [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]], [[0, -1.3], [1.3, 1], [-1.3, 1]]];
  if (n % 4 === 0) return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
  return `M${corners[n % 4 - 1].map(([a, b]) => `${x + r * a} ${y + r * b}`).join("L")}Z`;
}

/** What colours and shapes mean, below a drawing; entries that stand for a row are clicked as the row is. */
function legend(box, entries) {
  const list = add(box, "div", { class: "key-list" });
  for (const [text, colour, n, i = null] of entries) {
    const entry = add(list, "span", i === null ? {} : { "data-row": i, class: `mark${selection.picked.has(i) ? " picked" : ""}` });
    const swatch = add(entry, "svg", { viewBox: "0 0 22 12", width: 22, height: 12 });
    if (i === null) add(swatch, "path", { d: shape(n, 11, 6, 4.5), fill: colour });
    else add(swatch, "line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": at(DASHES, n) });
    add(entry, "span", {}, text);
  }
}

/** The caption of a figure, hidden where there is nothing to show; returns whether there is. */
function caption(id, text, some) {
  byId(id).hidden = !some;
  if (!some) byId(id).lastElementChild.replaceChildren();
  const line = byId(id).querySelector("figcaption");
  (line.querySelector(".about") ?? add(line, "span", { class: "about" })).textContent = text;
  return Boolean(some);
}

/** A choice in a figure's caption, made once; what is chosen. options: [value, text]. */
function choice(id, label, options, first) {
  const line = byId(id).querySelector("figcaption"), known = [...line.querySelectorAll("select")].find((each) => each.dataset.label === label);
  if (known) return known.value;
  const select = add(add(line, "label", { class: "control" }, `${label} `), "select", { "data-label": label });
  for (const [value, text] of options) add(select, "option", { value }, text);
  select.value = first;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  select.addEventListener("change", redraw);
  return select.value;
}
