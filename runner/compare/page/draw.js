// SVG: elements, scales, axes, colours. Colours of text and lines are the style sheet's, so that they follow dark and print.

// Okabe and Ito's colours, which the colour-blind can tell apart; dashes and shapes repeat what they say.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4"];
const RAMP = [[49, 80, 140], [42, 127, 158], [53, 165, 131], [140, 191, 74], [227, 194, 47]];  // low to high
const SVG = "http://www.w3.org/2000/svg";
const LETTER = 6.4;  // width of a letter in px
const at = (list, i) => list[i % list.length];
let paper = false;  // while it is printed

/** An element below another; texts are text, never markup. */
function add(parent, name, attributes = {}, text = "") {
  const inside = name === "svg" || parent.namespaceURI === SVG ? SVG : parent.namespaceURI;
  const element = document.createElementNS(inside, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  parent.append(element);
  return element;
}

const write = (svg, x, y, text, attributes = {}) => add(svg, "text", { x, y, ...attributes }, text);
const cut = (text, room) =>
  text.length * LETTER <= room ? text : `${text.slice(0, Math.max(1, Math.floor(room / LETTER) - 1))}\u2026`;

/** A mark that stands for a row: clicking it emphasises the row, pointing at it says what it is. */
function mark(parent, name, i, attributes, about = "") {
  const emphasis = selection.picked.has(i) ? " picked" : "";
  const element = add(parent, name, { ...attributes, class: `${attributes.class ?? ""} mark${emphasis}`, "data-row": i });
  add(element, "title", {}, `${i + 1}: ${rows[i].name}${about && `\n${about}`}`);
  return element;
}

// Figures of the page.

/** An empty drawing in a figure, as wide as that. */
function canvas(id, height) {
  const box = byId(id).lastElementChild, onPaper = byId(id).classList.contains("full") ? 1000 : 490;
  const width = paper ? onPaper : Math.max(box.clientWidth, 240);
  box.replaceChildren();
  return { box, width, svg: add(box, "svg", { role: "img", viewBox: `0 0 ${width} ${height}` }) };
}

/** The caption of a figure, which is hidden where there is nothing to show; returns whether there is. */
function caption(id, text, some) {
  const figure = byId(id), line = figure.querySelector("figcaption");
  figure.hidden = !some;
  if (!some) figure.lastElementChild.replaceChildren();
  (line.querySelector(".about") ?? add(line, "span", { class: "about" })).textContent = text;
  return Boolean(some);
}

/** A choice in a figure's caption, made once; what is chosen. options: [value, text]. */
function choice(id, label, options, first) {
  const line = byId(id).querySelector("figcaption");
  const known = [...line.querySelectorAll("select")].find((each) => each.dataset.label === label);
  if (known) return known.value;
  const select = add(add(line, "label", { class: "control" }, `${label} `), "select", { "data-label": label });
  for (const [value, text] of options) add(select, "option", { value }, text);
  select.value = first;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  select.addEventListener("change", redraw);
  return select.value;
}

const FIGURES = figures.map((figure) => [figure.key, figure.title]);
const KEYS = keys.map((key) => [key, key]);

/** What colours and shapes mean, below a drawing; entries that stand for a row are clicked as the row is. */
function legend(box, entries) {
  const list = add(box, "div", { class: "key-list" });
  for (const [text, colour, n, i = null] of entries) {
    const emphasis = selection.picked.has(i) ? " picked" : "";
    const entry = add(list, "span", i === null ? {} : { "data-row": i, class: `mark${emphasis}` });
    const swatch = add(entry, "svg", { viewBox: "0 0 22 12", width: 22, height: 12 });
    if (i === null) add(swatch, "path", { d: shape(n, 11, 6, 4.5), fill: colour });
    else add(swatch, "path", { d: "M0 6H22", stroke: colour, "stroke-width": 2.5, "stroke-dasharray": at(DASHES, n) });
    add(entry, "span", {}, text);
  }
}

// Scales: `at(value)` in px, and `ticks` as [value, text].

/** A number for an axis. */
function brief(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e\+?/, "e").replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** Round numbers from low to high. */
function between(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => (high - low) / size <= most) ?? 10 * power;
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Numbers along a line, with `value(px)` as the way back; pad: of their range, left free at both ends. */
function linear(values, from, to, { every = 70, pad = 0.05 } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * pad || (high > low ? 0 : Math.abs(high) * 0.05 || 1);
  [low, high] = [low >= 0 && low < margin ? 0 : low - margin, high + margin];
  return {
    at: (value) => from + (to - from) * (value - low) / (high - low),
    value: (pixel) => low + (high - low) * (pixel - from) / (to - from),
    ticks: between(low, high, Math.max(2, Math.abs(to - from) / every)).map((value) => [value, brief(value)]),
  };
}

/** Numbers of several magnitudes; shown: those with a tick. */
function logarithmic(values, from, to, shown) {
  const inner = linear(values.map(Math.log2), from, to);
  return { at: (value) => inner.at(Math.log2(value)), ticks: shown.map((value) => [value, brief(value)]) };
}

/** Values of a setting, evenly spaced, `step` px apart. */
function ordinal(values, from, to) {
  const all = distinct(values), step = (to - from) / all.length, ticks = all.map((value) => [value, `${value}`]);
  return { at: (value) => from + step * (all.indexOf(value) + 0.5), ticks, step: Math.abs(step) };
}

/** Values, each once: numbers by size, and before texts, which come as they come. */
function distinct(values) {
  const known = [...new Set(values)].filter((value) => value !== null && value !== undefined);
  const numbers = known.filter((value) => typeof value === "number").sort((a, b) => a - b);
  return [...numbers, ...known.filter((value) => typeof value !== "number")];
}

/** Whether values are drawn along a line: figures, and settings with many numbers. */
const isLine = (name, values, most) =>
  values.length && (figureOf(name) || (distinct(values).length > most && values.every((value) => typeof value === "number")));

function scaleOf(name, members, from, to) {
  const values = members.map((i) => valueOf(i, name));
  return isLine(name, values, 12) ? linear(values, from, to) : ordinal(values, from, to);
}

function titleOf(name) {
  const figure = figureOf(name);
  return figure ? figure.title + (figure.unit && `, ${figure.unit}`) : name;
}

/** Lines and labels of a plot that reaches from left to right and from top to bottom. */
function axes(svg, { left, right, top, bottom }, x, y, xTitle = "", yTitle = "") {
  for (const [value, text] of x?.ticks ?? []) {
    add(svg, "line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: top, y2: bottom });
    add(write(svg, x.at(value), bottom + 14, cut(text, x.step ?? 70), { "text-anchor": "middle" }), "title", {}, text);
  }
  for (const [value, text] of y?.ticks ?? []) {
    add(svg, "line", { class: "grid", x1: left, x2: right, y1: y.at(value), y2: y.at(value) });
    add(write(svg, left - 6, y.at(value) + 4, cut(text, left - 8), { "text-anchor": "end" }), "title", {}, text);
  }
  write(svg, right, bottom + 30, xTitle, { "text-anchor": "end", class: "axis" });
  write(svg, 2, top - 8, yTitle, { class: "axis" });
}

// Colours and shapes.

/** By a name: `of(row)` and `shape(row)`, and what they mean. A value keeps its colour whatever is selected. */
function coloursBy(name, members) {
  const known = measured(name, members), values = distinct(known.map((i) => valueOf(i, name)));
  if (isLine(name, values, COLOURS.length)) {
    const low = Math.min(...values), high = Math.max(...values);
    const of = (value) => ramp(high > low ? (value - low) / (high - low) : 1);
    const shown = [low, (low + high) / 2, high].map((value) => [brief(value), of(value), 0]);
    return { of: (i) => valueOf(i, name) === null ? "#8C8C8C" : of(valueOf(i, name)), shape: () => 0, legend: shown };
  }
  const all = distinct(rows.map((_, i) => valueOf(i, name))), place = (i) => all.indexOf(valueOf(i, name));
  const shown = all.map((value, n) => [`${value}`, at(COLOURS, n), n]).filter((_, n) => values.includes(all[n]));
  return { of: (i) => place(i) < 0 ? "#8C8C8C" : at(COLOURS, place(i)), shape: (i) => Math.max(place(i), 0), legend: shown };
}

/** A colour of the ramp, from 0 to 1. */
function ramp(share) {
  const place = share * (RAMP.length - 1), n = Math.min(Math.floor(place), RAMP.length - 2);
  return `rgb(${RAMP[n].map((part, k) => Math.round(part + (RAMP[n + 1][k] - part) * (place - n))).join(" ")})`;
}

/** Black or white, whichever is read better on a colour of the ramp. */
function onTop(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map(Number);
  return 0.3 * red + 0.6 * green + 0.1 * blue > 120 ? "black" : "white";
}

/** The outline of a point: circle, square, diamond, triangle. */
function shape(n, x, y, r) {
  if (n % 4 === 0) return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
  const corners = {
    1: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
    2: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
    3: [[0, -1.3], [1.3, 1], [-1.3, 1]],
  };
  return `M${corners[n % 4].map(([a, b]) => `${x + r * a} ${y + r * b}`).join("L")}Z`;
}
