"use strict";
// SVG elements, figures, scales and axes. The style sheet sets the colours of text and lines for light, dark and print.

// Okabe and Ito's colours, chosen for colour-blind readers. Curves also differ in dashes, and points in shapes.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4"];
const SVG = "http://www.w3.org/2000/svg";
const LETTER = 6.4;  // width of a letter in px
const at = (list, i) => list[i % list.length];
const byId = (id) => document.getElementById(id);
let paper = false;  // whether the page is being printed

/** Append a new element to `parent` and return the element. Text is inserted as text, never as markup. */
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

// Figures of the page.

/** Empty the box of a figure and add a drawing as wide as the box. Return the box, the drawing and the width. */
function canvas(id, height) {
  const box = byId(id).lastElementChild, small = byId("charts").classList.contains("few") ? 243 : 325;
  const onPaper = { "full half": 490, full: 1000 }[byId(id).className] ?? small;
  const width = paper ? onPaper : Math.max(box.clientWidth, 240);
  box.replaceChildren();
  return { box, width, svg: add(box, "svg", { role: "img", viewBox: `0 0 ${width} ${height}` }) };
}

/** Set the caption of a figure, or hide the figure if `some` is falsy. Return whether the figure is shown. */
function caption(id, text, some) {
  const figure = byId(id), line = figure.querySelector("figcaption");
  figure.hidden = !some;
  if (!some) figure.lastElementChild.replaceChildren();
  (line.querySelector(".about") ?? add(line, "span", { class: "about" })).textContent = text;
  return Boolean(some);
}

/** Return the chosen value of a select in a figure's caption. Add the select on the first call. options: [value, text]. */
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

/**
 * Explain colours and shapes below a drawing. entries: [text, colour, index of the shape] for points, and [text, colour, index
 * of the dashes, attributes] for lines.
 */
function legend(box, entries) {
  const list = add(box, "div", { class: "key-list" });
  for (const [text, colour, n, attributes = null] of entries) {
    const entry = add(list, "span", attributes ?? {});
    const swatch = add(entry, "svg", { viewBox: "0 0 22 12", width: 22, height: 12 });
    if (!attributes) add(swatch, "path", { d: shape(n, 11, 6, 4.5), fill: colour });
    else add(swatch, "path", { d: "M0 6H22", stroke: colour, "stroke-width": 2.5, "stroke-dasharray": at(DASHES, n) });
    add(entry, "span", {}, text);
  }
  return list;
}

// Scales. `at(value)` returns the position in px; `ticks` lists [value, text].

/** Return a number as text for an axis. */
function brief(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e\+?/, "e").replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** Return at most `most` round numbers from low to high, `least` or more apart. */
function between(low, high, most, least) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = Math.max(least, [1, 2, 5, 10].map((n) => n * power).find((size) => (high - low) / size <= most) ?? 10 * power);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/**
 * Return a linear scale, with the inverse `value(px)`. If all values are integers, such as steps, the ticks are integers.
 * pad: fraction of the range that is left free at each end.
 */
function linear(values, from, to, { every = 70, pad = 0.05 } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  const most = Math.max(2, Math.abs(to - from) / every), least = values.every(Number.isInteger) ? 1 : 0;
  const margin = (high - low) * pad || (high > low ? 0 : Math.abs(high) * 0.05 || 1);
  [low, high] = [low >= 0 && low < margin ? 0 : low - margin, high + margin];
  return {
    at: (value) => from + (to - from) * (value - low) / (high - low),
    value: (pixel) => low + (high - low) * (pixel - from) / (to - from),
    ticks: between(low, high, most, least).map((value) => [value, brief(value)]),
  };
}

/** Return a logarithmic scale. shown: the numbers with a tick. */
function logarithmic(values, from, to, shown) {
  const inner = linear(values.map(Math.log2), from, to);
  return { at: (value) => inner.at(Math.log2(value)), ticks: shown.map((value) => [value, brief(value)]) };
}

/** Return a scale of evenly spaced values, `step` px apart. */
function ordinal(values, from, to) {
  const all = distinct(values), step = (to - from) / all.length, ticks = all.map((value) => [value, `${value}`]);
  return { at: (value) => from + step * (all.indexOf(value) + 0.5), ticks, step: Math.abs(step) };
}

/** Return distinct values: first sorted numbers, then texts in order of appearance. */
function distinct(values) {
  const known = [...new Set(values)].filter((value) => value !== null && value !== undefined);
  const numbers = known.filter((value) => typeof value === "number").sort((a, b) => a - b);
  return [...numbers, ...known.filter((value) => typeof value !== "number")];
}

/** Draw the grid, tick labels and axis titles of a plot. */
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

/** Return the outline of a point. n: circle, square, diamond or triangle; r: about half of the width in px. */
function shape(n, x, y, r) {
  if (n % 4 === 0) return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
  const corners = {
    1: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
    2: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
    3: [[0, -1.3], [1.3, 1], [-1.3, 1]],
  };
  return `M${corners[n % 4].map(([a, b]) => `${x + r * a} ${y + r * b}`).join("L")}Z`;
}
