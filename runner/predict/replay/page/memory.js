// Draws memory over a step by category, with the device's limits and the values at the pointer.

const DATA = JSON.parse(byId("data").textContent);  // null if there is nothing to draw

// Colours of the categories, from the bottom of the stack to the top. Memory that outlives a step is at the bottom.
const COLOUR = {
  parameters: "#0072B2", optimizer: "#009E73", gradients: "#D55E00", activations: "#E69F00",
  unsharded: "#56B4E9", communication: "#CC79A7", logits: "#F0E442", temporary: "#8C8C8C",
};
const ROWS = 4;  // maximum number of rows of part names
const FLAT = 0.25;  // if memory peaks below this share of the limit, scale the chart to the step
const LIMITS = [["limit", 1, DATA?.capacity], ["device", 0, DATA?.memory]]  // name, 1 if dashed, GiB
  .filter(([name]) => name !== "device" || DATA?.memory > DATA?.capacity);

const within = (value, low, high) => Math.max(low, Math.min(value, high));

const stacked = Object.keys(COLOUR).filter((name) => DATA?.categories[name]);
const totals = DATA?.at.map((_, i) => stacked.reduce((sum, name) => sum + DATA.categories[name][i], 0)) ?? [];
const highest = totals.indexOf(Math.max(...totals));
const gib = (value) => value.toFixed(value >= 1 || totals[highest] >= 1 ? 2 : 4);
const said = (i) => `${i === highest ? "peak: " : ""}${gib(totals[i])} GiB, ${DATA.phases[DATA.phase[i]]}`;

/** Return the path of a step line: each value holds until the next value. */
const steps = (values, x, y) =>
  values.map((value, i) => `${i ? `H${x(DATA.at[i]).toFixed(1)}V` : `M${x(DATA.at[0])} `}${y(value).toFixed(1)}`).join("");

function redraw() {
  const reserved = DATA?.reserved ?? [], most = Math.max(...totals, ...reserved), few = most < FLAT * DATA?.capacity;
  if (!caption("memory", "", totals.length)) return;
  const options = [["device", "the device"], ["step", "the step"]];
  const device = choice("memory", "Scale to", options, few ? "step" : "device") === "device";
  const above = device ? "" : "; the memory limit is above the chart";
  caption("memory", `Memory of tensors over a step, in the order of allocations and frees${above}`, true);

  const { box, svg, width } = canvas("memory", 440), area = { left: 46, right: width - 6, top: 24, bottom: 390 };
  const x = linear([0, DATA.at.at(-1)], area.left, area.right, { pad: 0 });
  const y = linear([0, most, ...(device ? [DATA.memory] : [])], area.bottom, area.top, { every: 45 });
  svg.setAttribute("aria-label", `Memory over a step; ${said(highest)}`);
  axes(svg, area, null, y, "", "GiB");
  let below = totals;  // draw higher categories first, down to the axis, and lower categories over them
  for (const name of [...stacked].reverse()) {
    const d = `${steps(below, x.at, y.at)}H${area.right}V${area.bottom}H${area.left}Z`;
    add(svg, "path", { class: "area", d, fill: COLOUR[name], "data-name": name });
    below = below.map((value, i) => value - DATA.categories[name][i]);
  }
  if (DATA.reserved) add(svg, "path", { class: "reserved", d: `${steps(reserved, x.at, y.at)}H${area.right}` });
  for (const [name, , value] of LIMITS) {
    if (device) add(svg, "path", { class: `limit ${name}`, d: `M${area.left} ${y.at(value)}H${area.right}` });
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${drawParts(svg, area, x)}`);
  const dot = add(svg, "path", { class: "peak", d: shape(0, x.at(DATA.at[highest]), y.at(totals[highest]), 4) });
  add(dot, "title", {}, said(highest));
  follow(box, svg, area, x);
}

/** Draw a strip of the step's parts below the chart, and name the longest parts if there is room. Return the total height. */
function drawParts(svg, { left, right, top, bottom }, x) {
  const strip = add(svg, "g"), taken = Array.from({ length: ROWS }, () => []), named = new Set();
  let line = left;
  const parts = DATA.parts.map(([name, from, to]) => ({ name, from: x.at(from), to: x.at(to), wide: name.length * LETTER }));
  for (const { name, from, to } of parts) {
    add(add(strip, "rect", { class: "part", x: from, y: bottom + 3, width: to - from, height: 8 }), "title", {}, name);
    if (from < line + 4) continue;
    add(svg, "path", { class: "grid", d: `M${from} ${top}V${bottom + 11}` });
    line = from;
  }
  for (const { name, from, to, wide } of parts.sort((one, other) => other.to - other.from - one.to + one.from)) {
    if (named.has(name) && to - from < wide) continue;
    const start = within((from + to - wide) / 2, left, right - wide), end = start + wide;
    const row = taken.findIndex((names) => names.every(([a, b]) => end + 8 < a || start - 8 > b));
    if (row < 0) continue;
    taken[row].push([start, end]);
    named.add(name);
    const middle = within((from + to) / 2, start, end), height = bottom + 26 + 14 * row;
    if (row) add(svg, "path", { class: "grid", d: `M${middle} ${bottom + 11}V${height - 10}` });
    write(svg, start, height, name);
  }
  return bottom + 20 + 14 * taken.filter((names) => names.length).length;
}

/** Draw a line at the pointer, initially at the peak, and show the memory held at that moment below the chart. */
function follow(box, svg, { left, right, top, bottom }, x) {
  const cursor = add(svg, "path", { class: "cursor" }), label = write(svg, 0, top - 8, "", { class: "over moment" });
  const entries = stacked.map((name) => [name, COLOUR[name], 1]);
  const values = stacked.map((name) => DATA.categories[name]);
  if (DATA.reserved) {
    entries.push(["reserved", "currentColor", 1, {}]);
    values.push(DATA.reserved);
  }
  for (const [name, dashes, value] of LIMITS) entries.push([`${name} ${gib(value)} GiB`, "var(--limit)", dashes, {}]);
  const texts = [...legend(box, entries).children].map((entry) => entry.lastElementChild);
  const show = (i) => {
    const place = x.at(DATA.at[i]), text = said(i), half = text.length * LETTER / 2;
    cursor.setAttribute("d", `M${place} ${top - 4}V${bottom}`);
    label.setAttribute("x", within(place - half, left, right - 2 * half));
    label.textContent = text;
    values.forEach((each, n) => { texts[n].textContent = `${entries[n][0]} ${gib(each[i])} GiB`; });
  };
  const point = (event) => {
    const pixel = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const after = DATA.at.findIndex((at) => at > x.value(pixel));
    show(after < 0 ? DATA.at.length - 1 : Math.max(after - 1, 0));
  };
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(highest));  // a touch keeps the line
  show(highest);
}

redraw();
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (lastWidth === innerWidth) return;  // ignore changes of height: a phone's bars come and go
  lastWidth = innerWidth;
  redraw();
});
for (const [event, on] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    paper = on;
    redraw();
  });
}
