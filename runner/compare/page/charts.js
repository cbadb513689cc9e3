// Charts of the selected rows by their figures: the best rows by one figure, and all rows by any two figures.

const TOP = 20;  // maximum number of rows in the chart of the best rows
const SECONDS = "seconds per step", GIB = "GiB at the peak";  // titles of ledgers
const sum = (values) => values.reduce((one, other) => one + other, 0);

/** Return a value of a row in the form that the table shows, such as `6,150`. */
const written = (i, name) =>
  figureOf(name) ? cellOf(i, figureOf(name).column).split(" (")[0] : `${valueOf(i, name) ?? "unknown"}`;
const told = (i, ...names) => names.filter(Boolean).map((name) => `${titleOf(name)}: ${written(i, name)}`).join("\n");

/** Sort clicked rows last, so that clicked rows are drawn on top. */
const emphasised = (members) => [...members].sort((i, j) => selection.picked.has(i) - selection.picked.has(j));

/** Draw a strip for each row, below the row's name. each(svg, i, x, y) draws the strip; values(i) determine the scale. */
function strips(id, members, values, each, title) {
  const tall = paper ? 25 : 32, bottom = tall * members.length + 10;
  const { svg, width } = canvas(id, bottom + 34), x = linear(members.flatMap(values), 10, width - 60);
  axes(svg, { left: 4, right: width - 4, top: 4, bottom }, x, null, title);
  members.forEach((i, n) => {
    write(mark(svg, "g", i, {}), 4, tall * n + 14, cut(`${i + 1}: ${rows[i].name}`, width - 10));
    each(svg, i, x, tall * n + (paper ? 22 : 27));
  });
}

function drawDots() {
  const name = choice("dots", "Best rows by", FIGURES, DATA.speed), members = ranked(name, measured(name));
  const top = members.slice(0, TOP), range = (i) => rangeOf(i, name);
  const isBase = (i) => rows.some((row) => row.baseline === i);
  byId("dots").classList.toggle("tall", top.length > TOP / 2);
  const many = members.length > TOP ? `${TOP} of ${members.length} rows` : "", hollow = top.some(isBase) ? "hollow: a baseline" : "";
  const about = [many, ranges(top, name), hollow].filter(Boolean);
  if (!caption("dots", about.join("; "), figures.length && members.length)) return;
  strips("dots", top, range, (svg, i, x, y) => {
    const [value, low = value, high = value] = range(i), group = mark(svg, "g", i, {}, told(i, name));
    add(group, "line", { class: "range", x1: x.at(low), x2: x.at(high), y1: y, y2: y });
    add(group, "circle", { class: isBase(i) ? "base" : "dot", cx: x.at(value), cy: y, r: 5 });
    write(group, x.at(high) + 9, y + 4, written(i, name));
  }, titleOf(name));
}

function drawScatter() {
  const options = [...FIGURES, ...KEYS], compared = DATA.baseline?.split("=")[0] ?? keys[0];
  const x = choice("scatter", "x", options, DATA.memory ?? keys[0]), y = choice("scatter", "y", options, DATA.speed);
  const by = choice("scatter", "colour", options, compared);
  const members = measured(x, measured(y)).filter(hasResult), optimal = front(x, y);
  const about = [optimal.length ? "dotted: rows that no row shown beats in both" : "", ranges(members, x, y)].filter(Boolean);
  if (!caption("scatter", about.join("; "), figures.length && members.length)) return;
  const bottom = paper ? 150 : 330, { box, svg, width } = canvas("scatter", bottom + 50);
  const area = { left: 70, right: width - 14, top: 24, bottom };
  const across = scaleOf(x, members, area.left, area.right), up = scaleOf(y, members, area.bottom, area.top);
  const place = (i) => [across.at(valueOf(i, x)), up.at(valueOf(i, y))], colours = coloursBy(by, members);
  axes(svg, area, across, up, titleOf(x), titleOf(y));
  drawLimits(svg, members, area, x, across, y, up);
  if (optimal.length > 1) add(svg, "polyline", { class: "front", points: optimal.map(place).join(" ") });
  for (const i of emphasised(members)) {
    interval(svg, i, colours.of(i), place(i), endsOf(i, x).map(across.at), endsOf(i, y).map(up.at));
    const outline = shape(colours.shape(i), ...place(i), 5.5);
    mark(svg, "path", i, { class: "point", d: outline, fill: colours.of(i) }, told(i, x, y, by));
  }
  legend(box, colours.legend);
  brush(svg, area, ({ left, right, top, bottom }) => {
    const ends = [[x, across, left, right], [y, up, bottom, top]].filter(([, scale]) => scale.value);
    const rounded = (scale, pixel) => Number(scale.value(pixel).toPrecision(4));
    narrow(...ends.flatMap(([name, scale, from, to]) =>
      [[name, ">", rounded(scale, from)], [name, "<", rounded(scale, to)]]));
  });
}

/** Draw a line at the memory capacity of the devices, if an axis shows memory and includes the capacity. */
function drawLimits(svg, members, { left, right, top, bottom }, x, across, y, up) {
  const ofDevice = (name) => /memory.peak_(active|reserved)_gib$/.test(name);
  for (const limit of new Set(members.map((i) => rows[i].limit).filter(Boolean))) {
    const [px, py] = [ofDevice(x) ? across.at(limit) : NaN, ofDevice(y) ? up.at(limit) : NaN];
    if (px >= left && px <= right) add(svg, "path", { class: "limit", d: `M${px} ${top}V${bottom}` });
    if (py >= top && py <= bottom) add(svg, "path", { class: "limit", d: `M${left} ${py}H${right}` });
  }
}

/** Let the user drag a rectangle with the mouse, then call done({ left, right, top, bottom }) in px. */
function brush(svg, area, done) {
  let start = null, frame = null;
  const within = (value, low, high) => Math.min(Math.max(value, low), high);
  const corners = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const x = within(point.x, area.left, area.right), y = within(point.y, area.top, area.bottom), from = start ?? { x, y };
    return { x, y, left: Math.min(x, from.x), right: Math.max(x, from.x), top: Math.min(y, from.y), bottom: Math.max(y, from.y) };
  };
  const end = () => { frame?.remove(); start = frame = null; };
  svg.addEventListener("pointerdown", (event) => { start = event.pointerType === "mouse" ? corners(event) : null; });
  svg.addEventListener("pointermove", (event) => {
    if (!start) return;
    const { left, right, top, bottom } = corners(event);
    frame ??= add(svg, "path", { class: "brush" });
    frame.setAttribute("d", `M${left} ${top}H${right}V${bottom}H${left}Z`);
  });
  svg.addEventListener("pointerup", (event) => {
    const chosen = corners(event), dragged = frame && chosen.right - chosen.left > 5 && chosen.bottom - chosen.top > 5;
    end();
    if (dragged) done(chosen);
  });
  svg.addEventListener("pointerleave", end);
}

/** Draw the median step of each traced row as a bar of its parts. */
function drawSteps() {
  const members = selection.rows.filter((i) => rows[i].ledgers[SECONDS]), top = members.slice(0, TOP);
  const many = members.length > TOP ? `; ${TOP} of ${members.length} rows` : "";
  if (!caption("step", `Parts of the median step${many}`, members.length)) return;
  const parts = distinct(Object.values(DATA.groups)), colour = (part) => at(COLOURS, parts.indexOf(part));
  const sums = (i) => parts.map((part) => [part, sum(Object.entries(rows[i].ledgers[SECONDS])
    .map(([line, seconds]) => DATA.groups[line] === part ? seconds : 0))]).filter(([, seconds]) => seconds > 0);
  strips("step", top, (i) => [0, sum(sums(i).map(([, seconds]) => seconds))], (svg, i, x, y) => {
    let end = 0;
    for (const [part, seconds] of sums(i)) {
      const d = `M${x.at(end)} ${y - 6}H${x.at(end += seconds)}v12H${x.at(end - seconds)}z`;
      mark(svg, "path", i, { d, fill: colour(part) }, `${part}: ${brief(seconds)} s`);
    }
  }, SECONDS);
  legend(byId("step").lastElementChild, parts.map((part) => [part, colour(part), 1]));
}
