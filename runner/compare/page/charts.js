// Charts of the selected rows: by one figure, by any two, by two settings, by all of them, and over devices.

const TOP = 20;  // rows of a chart with a line for each

/** A figure of a row as the table writes it: `6,150`. */
const written = (i, name) => figureOf(name) ? cellOf(i, figureOf(name).column).split(" (")[0] : `${valueOf(i, name) ?? "unknown"}`;
const told = (i, ...names) => names.filter(Boolean).map((name) => `${titleOf(name)}: ${written(i, name)}`).join("\n");

/** A line for each of some rows, with its name above it: `each(svg, i, x, y)` draws on it, values(i) decide the scale. */
function strips(id, members, values, each, title) {
  const tall = paper ? 25 : 32, bottom = tall * members.length + 10;
  const { svg, width } = canvas(id, bottom + 34), x = linear(members.flatMap(values), 10, width - 60);
  axes(svg, { left: 4, right: width - 4, top: 4, bottom }, x, null, title);
  members.forEach((i, n) => {
    write(mark(svg, "g", i, {}), 4, tall * n + 14, cut(`${i + 1}: ${rows[i].name}`, width - 10), { class: "name" });
    each(svg, i, x, tall * n + (paper ? 22 : 27));
  });
}

function drawDots() {
  const name = choice("dots", "Best rows by", figures.map((figure) => [figure.key, figure.title]), DATA.speed);
  const sign = figureOf(name)?.better, members = figureOf(name) ? measured(name).sort((a, b) => sign * (valueOf(b, name) - valueOf(a, name))) : [];
  const range = (i) => rows[i].figures[name].map((value) => value ?? valueOf(i, name));
  if (!caption("dots", members.length > TOP ? `${TOP} of ${members.length}` : "", members.length)) return;
  const isBase = (i) => rows.some((row) => row.baseline === i);
  const spread = (members.some((i) => range(i).length > 1) ? "; the line is the range" : "") + (members.some(isBase) ? "; hollow: a baseline" : "");
  strips("dots", members.slice(0, TOP), range, (svg, i, x, y) => {
    const [value, low = value, high = value] = range(i);
    const group = mark(svg, "g", i, {}, told(i, name));
    add(group, "line", { class: "range", x1: x.at(low), x2: x.at(high), y1: y, y2: y });
    add(group, "circle", { class: isBase(i) ? "base" : "dot", cx: x.at(value), cy: y, r: 5 });
    write(group, x.at(high) + 9, y + 4, written(i, name));
  }, titleOf(name) + spread);
}

function drawScatter() {
  const axesOf = [...figures.map((figure) => [figure.key, figure.title]), ...keys.map((key) => [key, key])];
  const x = choice("scatter", "x", axesOf, DATA.memory ?? keys[0]), y = choice("scatter", "y", axesOf, DATA.speed);
  const by = choice("scatter", "colour", axesOf, keys.find((key) => key === DATA.baseline?.split("=")[0]) ?? keys[0] ?? DATA.speed);
  const members = measured(x, measured(y)).filter((i) => rows[i].completed);
  const line = front(x, y);
  if (!caption("scatter", line.length ? "dotted: no row shown is better in both" : "", figures.length && members.length)) return;
  const { box, svg, width } = canvas("scatter", 380), area = { left: 70, right: width - 14, top: 24, bottom: 330 };
  const across = scaleOf(x, members, area.left, area.right), up = scaleOf(y, members, area.bottom, area.top), colours = coloursBy(by, members);
  axes(svg, area, across, up, titleOf(x), titleOf(y));
  for (const [name, scale, vertical] of [[x, across, true], [y, up, false]]) limits(svg, name, scale, vertical, members, area);
  const place = (i) => [across.at(valueOf(i, x)), up.at(valueOf(i, y))];
  if (line.length > 1) add(svg, "polyline", { class: "front", points: line.map(place).join(" ") });
  for (const i of emphasised(members)) {
    mark(svg, "path", i, { d: shape(colours.shape(i), ...place(i), 5.5), fill: colours.of(i), class: "point" }, told(i, x, y, by));
  }
  legend(box, colours.legend);
  brush(svg, area, (left, right, low, high) => {
    const terms = [[x, across, left, right], [y, up, low, high]].filter(([, scale]) => scale.value);
    const digits = (value) => Number(value.toPrecision(4));
    narrow(...terms.flatMap(([name, scale, from, to]) => [[name, ">", digits(scale.value(from))], [name, "<", digits(scale.value(to))]]));
  });
}

/** Clicked rows last, so that they lie on top. */
const emphasised = (members) => [...members].sort((a, b) => selection.picked.has(a) - selection.picked.has(b));

/** The memory of the devices, where an axis of memory reaches it. */
function limits(svg, name, scale, vertical, members, { left, right, top, bottom }) {
  if (!name.startsWith("memory/peak_a") && !name.startsWith("memory/peak_res")) return;
  for (const limit of new Set(members.map((i) => rows[i].limit).filter(Boolean))) {
    const place = scale.at(limit), [from, to] = vertical ? [left, right] : [top, bottom];
    if (place < from || place > to) continue;
    add(svg, "line", { class: "limit", ...(vertical ? { x1: place, x2: place, y1: top, y2: bottom } : { x1: left, x2: right, y1: place, y2: place }) });
  }
}

/** Dragging a rectangle: done(left, right, bottom, top) in px. */
function brush(svg, { left, right, top, bottom }, done) {
  let from = null, box = null;
  const where = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [Math.min(Math.max(point.x, left), right), Math.min(Math.max(point.y, top), bottom)];
  };
  svg.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? where(event) : null; });
  svg.addEventListener("pointermove", (event) => {
    if (!from) return;
    const [x, y] = where(event);
    box ??= add(svg, "rect", { class: "brush" });
    for (const [key, value] of Object.entries({ x: Math.min(x, from[0]), y: Math.min(y, from[1]), width: Math.abs(x - from[0]), height: Math.abs(y - from[1]) })) box.setAttribute(key, value);
  });
  svg.addEventListener("pointerup", (event) => {
    const start = from, [x, y] = where(event), dragged = box && Math.hypot(x - start[0], y - start[1]) > 8;
    from = null;
    box?.remove();
    box = null;
    if (dragged) done(Math.min(x, start[0]), Math.max(x, start[0]), Math.max(y, start[1]), Math.min(y, start[1]));
  });
  svg.addEventListener("pointerleave", () => { box?.remove(); from = box = null; });
}

function drawHeat() {
  const known = keys.filter((key) => { const count = new Set(rows.map((row) => row.values[key])).size; return count > 1 && count <= 40; });
  if (!caption("heat", "", known.length >= 2 && figures.length)) return;
  const options = known.map((key) => [key, key]);
  const name = choice("heat", "Best", figures.map((figure) => [figure.key, figure.title]), DATA.speed);
  const down = choice("heat", "by", options, known[0]), across = choice("heat", "and", options, known[1]);
  const members = selection.rows.filter((i) => valueOf(i, down) !== null && valueOf(i, across) !== null), sign = figureOf(name).better;
  if (!caption("heat", "", members.length && down !== across)) return;
  const [ys, xs] = [down, across].map((key) => distinct(members.map((i) => valueOf(i, key))));
  const left = Math.min(140, 14 + LETTER * Math.max(...ys.map((value) => `${value}`.length), 3)), tall = 30;
  const { box, svg, width } = canvas("heat", 60 + tall * ys.length), area = { left, right: width - 4, top: 22, bottom: 22 + tall * ys.length };
  const x = ordinal(xs, area.left, area.right), y = ordinal(ys, area.top, area.bottom), shown = measured(name, members);
  const colours = coloursBy(name, shown);
  axes(svg, area, x, y, across, down);
  for (const a of ys) for (const b of xs) {
    const here = members.filter((i) => valueOf(i, down) === a && valueOf(i, across) === b);
    const found = here.filter((i) => shown.includes(i)).sort((i, j) => sign * (valueOf(j, name) - valueOf(i, name)))[0] ?? here[0];
    if (found === undefined) continue;
    const text = shown.includes(found) ? written(found, name) : rows[found].state;
    const cell = add(svg, "g", { class: `cell mark${here.some((i) => selection.picked.has(i)) ? " picked" : ""}` });
    add(cell, "title", {}, `${down}=${a} ${across}=${b}: ${text}${here.length > 1 ? `, the best of ${here.length} rows` : ""}\n${rows[found].name}`);
    add(cell, "rect", { x: x.at(b) - x.step / 2 + 1, y: y.at(a) - tall / 2 + 1, width: Math.max(x.step - 2, 1), height: tall - 2, ...(shown.includes(found) ? { fill: colours.of(found) } : { class: "none" }) });
    if (x.step > 34) write(cell, x.at(b), y.at(a) + 4, cut(text, x.step - 4), { "text-anchor": "middle", style: shown.includes(found) ? `fill: ${onTop(colours.of(found))}` : "" });
    cell.addEventListener("click", () => narrow([down, "=", `${a}`], [across, "=", `${b}`]));
  }
  legend(box, colours.legend);
}

/** Each setting and figure an axis, one below the other, each row a line through all of them. */
function drawParallel() {
  const varying = keys.filter((key) => new Set(rows.map((row) => row.values[key])).size > 1), results = [DATA.memory, DATA.speed].filter(figureOf);
  const by = results.at(-1) ?? keys[0], gap = 58;
  if (!caption("parallel", `a line is a row, coloured by ${titleOf(by)}; dashed: without a result; a click on a value selects it`, varying.length >= 3 && selection.rows.length)) return;
  const names = [...varying, ...results];
  const { box, svg, width } = canvas("parallel", gap * names.length + 10), colours = coloursBy(by, selection.rows);
  const scales = names.map((name) => scaleOf(name, measured(name), 16, width - 16));
  for (const i of emphasised(selection.rows)) {
    const points = names.map((name, n) => {
      const value = valueOf(i, name), aside = scales[n].step ? ((i * 37) % 21 - 10) / 21 * Math.min(scales[n].step * 0.5, 40) : 0;
      return value === null ? null : `${(scales[n].at(value) + aside).toFixed(1)} ${gap * n + 34}`;
    });
    mark(svg, "polyline", i, { class: rows[i].completed ? "way" : "way none", points: points.filter(Boolean).join(" "), stroke: colours.of(i) }, told(i, ...results));
  }
  names.forEach((name, n) => {
    const y = gap * n + 34, scale = scales[n];
    add(svg, "line", { class: "grid strong", x1: 4, x2: width - 4, y1: y, y2: y });
    write(svg, 2, y - 20, titleOf(name), { class: "axis over" });
    for (const [value, text] of scale.ticks) {
      const label = write(svg, scale.at(value), y - 6, cut(text, scale.step ?? 70), { "text-anchor": "middle", class: scale.step ? "link over" : "over" });
      add(label, "title", {}, text);
      if (scale.step) label.addEventListener("click", () => narrow([name, "=", text]));
    }
  });
  legend(box, colours.legend);
}

/** The name of a row without some keys. */
function briefName(i, without) {
  const parts = keys.filter((key) => Object.hasOwn(rows[i].values, key) && !without.includes(key)).map((key) => [key.split(".").at(-1), rows[i].values[key]]);
  return parts.map(([key, value]) => typeof value === "number" ? `${key}=${value}` : value).join(" ") || "these rows";
}

/** Words per second of all devices together, over their number; rows that differ in nothing else are one line. */
function drawScaling() {
  const members = measured("perf/wps").filter((i) => rows[i].devices), devices = distinct(members.map((i) => rows[i].devices));
  const total = (i) => valueOf(i, "perf/wps") * rows[i].devices, lines = new Map();
  const follows = keys.filter((key) => /^(launch\.|world_size$|parallelism\.(shard|replicate)$|global_batch$)/.test(key));
  for (const i of members) {
    const rest = JSON.stringify(keys.filter((key) => !follows.includes(key)).map((key) => rows[i].values[key] ?? null));
    lines.set(rest, [...(lines.get(rest) ?? []), i]);
  }
  const series = [...lines.values()].filter((line) => new Set(line.map((i) => rows[i].devices)).size > 1).sort((a, b) => Math.max(...b.map(total)) - Math.max(...a.map(total)));
  const left = series.splice(COLOURS.length).length;
  for (const line of series) line.sort((i, j) => rows[i].devices - rows[j].devices);
  if (!caption("scaling", `Tokens per second of all devices; dashed: ideal${left ? `; the ${series.length} fastest lines of ${series.length + left}` : ""}`, series.length)) return;
  const ideal = (line, count) => total(line[0]) / rows[line[0]].devices * count;
  const { box, svg, width } = canvas("scaling", 360), area = { left: 70, right: width - 20, top: 24, bottom: 310 };
  const reach = [...series.flat().map(total), ...series.map((line) => ideal(line, rows[line.at(-1)].devices))], wide = devices.at(-1) / devices[0] > 16;
  const powers = Array.from({ length: 40 }, (_, n) => 10 ** (n - 5)).filter((power) => power > Math.min(...reach) / 2 && power < Math.max(...reach) * 2);
  const x = wide ? logarithmic(devices, area.left + 10, area.right - 10, devices) : { ...linear(devices, area.left, area.right), ticks: devices.map((n) => [n, brief(n)]) };
  const y = wide ? logarithmic(reach, area.bottom, area.top, powers) : linear([0, ...reach], area.bottom, area.top, { every: 45 });
  axes(svg, area, x, y, "devices", "tokens per second");
  series.forEach((line, n) => {
    const last = rows[line.at(-1)].devices, place = (i) => `${x.at(rows[i].devices)} ${y.at(total(i))}`;
    add(svg, "polyline", { class: "ideal", points: `${place(line[0])} ${x.at(last)} ${y.at(ideal(line, last))}` });
    add(svg, "polyline", { class: "curve", points: line.map(place).join(" "), stroke: at(COLOURS, n), "stroke-dasharray": at(DASHES, Math.floor(n / COLOURS.length)) });
  });
  series.forEach((line, n) => line.forEach((i) => {
    const share = 100 * total(i) / ideal(line, rows[i].devices), least = rows[line[0]].devices;
    mark(svg, "path", i, { d: shape(n, x.at(rows[i].devices), y.at(total(i)), 5), fill: at(COLOURS, n), class: "point" },
      `${told(i, "perf/wps")}\nscaling: ${share.toFixed(1)}% of ${least} device${least > 1 ? "s" : ""}`);
  }));
  legend(box, series.map((line, n) => [briefName(line[0], follows), at(COLOURS, n), n]));
}
