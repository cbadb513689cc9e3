// Charts of the selected rows by settings: by any two settings, by all settings, and by the number of devices.

const varying = keys.filter((key) => new Set(rows.map((row) => row.values[key])).size > 1);
const MOST = 40;  // maximum number of a setting's values in a heat map
const NAMED = 110;  // minimum width in px of heat-map cells that name their best row

/** Return the cells of a heat map of a figure. A cell has a colour and its best row, which is measured or else predicted. */
function heatCells(name, down, across) {
  const members = measured(down, measured(across)), figures = [name, `plan/${name}`];
  const [ys, xs] = [down, across].map((key) => distinct(members.map((i) => valueOf(i, key))));
  const cells = ys.flatMap((a) => xs.map((b) => {
    const here = members.filter((i) => valueOf(i, down) === a && valueOf(i, across) === b);
    const figure = figures.find((each) => figureOf(each) && measured(each, here).length);
    const found = figure ? ranked(figure, measured(figure, here))[0] : here[0];
    // Values are not comparable between models, so each model has its own scale of colours.
    const scale = DATA.workload.includes(down) ? a : DATA.workload.includes(across) ? b : "";
    return { a, b, here, figure, found, scale, value: figure ? valueOf(found, figure) : null };
  })).filter(({ found }) => found !== undefined);
  for (const cell of cells) {
    const alike = cells.filter(({ scale, value }) => scale === cell.scale && value !== null).map(({ value }) => value);
    const low = Math.min(...alike), high = Math.max(...alike);
    cell.colour = cell.figure ? ramp(high > low ? (cell.value - low) / (high - low) : 1) : "";
    cell.ends = [low, high];
  }
  return { cells, xs, ys };
}

function drawHeat() {
  const known = varying.filter((key) => new Set(rows.map((row) => row.values[key])).size <= MOST);
  if (!caption("heat", "", known.length >= 2 && figures.length)) return;
  const options = known.map((key) => [key, key]), name = choice("heat", "Best", FIGURES, DATA.speed);
  const first = [...new Set([...DATA.best_by.filter((key) => known.includes(key)), ...known])];
  const down = choice("heat", "by", options, first[0]), across = choice("heat", "and", options, first[1]);
  const { cells, xs, ys } = heatCells(name, down, across), isGuess = ({ figure }) => figure?.startsWith("plan/");
  if (!caption("heat", cells.some(isGuess) ? "hatched: predicted" : "", cells.length && down !== across)) return;
  const left = Math.min(140, 14 + LETTER * Math.max(3, ...ys.map((value) => `${value}`.length)));
  const wide = (byId("heat").clientWidth - left) / xs.length > NAMED, tall = wide ? 44 : 30;
  const { box, svg, width } = canvas("heat", 60 + tall * ys.length);
  const area = { left, right: width - 4, top: 22, bottom: 22 + tall * ys.length };
  const x = ordinal(xs, area.left, area.right), y = ordinal(ys, area.top, area.bottom);
  const hatch = add(svg, "pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  add(hatch, "path", { d: "M0 0V6" });
  axes(svg, area, x, y, across, down);
  for (const cell of cells) {
    const { a, b, here, found, figure, colour } = cell, text = figure ? written(found, figure) : rows[found].state;
    const emphasis = here.some((i) => selection.picked.has(i)) ? " picked" : "";
    const group = add(svg, "g", { class: `cell mark${emphasis}` }), many = here.length > 1 ? `, the best of ${here.length}` : "";
    add(group, "title", {}, `${down}=${a} ${across}=${b}: ${text}${many}\n${rows[found].name}`);
    const corner = { x: x.at(b) - x.step / 2 + 1, y: y.at(a) - tall / 2 + 1 };
    const size = { width: Math.max(x.step - 2, 1), height: tall - 2 };
    add(group, "rect", { ...corner, ...size, ...(figure ? { fill: colour } : { class: "none" }) });
    if (isGuess(cell)) add(group, "rect", { ...corner, ...size, fill: "url(#hatch)" });
    const style = figure ? `fill: ${onTop(colour)}; stroke: ${colour}` : "";
    const lines = [text, ...(wide && here.length > 1 ? [nameOfRow(found, [down, across])] : [])];
    lines.forEach((line, n) => {
      const attributes = { "text-anchor": "middle", class: "over", style };
      if (x.step > 34) write(group, x.at(b), y.at(a) + 4 + 16 * (n - (lines.length - 1) / 2), cut(line, x.step - 4), attributes);
    });
    group.addEventListener("click", () => narrow([down, "=", `${a}`], [across, "=", `${b}`]));
  }
  const [low, high] = (cells.find(({ figure }) => figure) ?? cells[0]).ends, one = new Set(cells.map(({ scale }) => scale)).size < 2;
  const ends = one ? [low, (low + high) / 2, high].map(brief) : ["lowest of each model or length", "", "highest"];
  legend(box, ends.map((text, n) => [text, ramp(n / 2), 0]).filter(([text]) => text));
}

/** Draw an axis for each setting and figure, one below the other, and each row as a line through all axes. */
function drawParallel() {
  const results = [DATA.memory, DATA.speed].filter(figureOf), by = results.at(-1) ?? keys[0], gap = paper ? 40 : 58;
  const about = `each line is a row, coloured by ${titleOf(by)}; dashed: no result; click a value to select its rows`;
  if (!caption("parallel", about, varying.length >= 3 && selection.rows.length)) return;
  const names = [...varying, ...results], colours = coloursBy(by, selection.rows), height = (n) => gap * n + 34;
  const { box, svg, width } = canvas("parallel", gap * names.length + 10);
  const scales = names.map((name) => scaleOf(name, measured(name), 16, width - 16));
  // Shift rows sideways, because rows with the same value would share one point.
  const aside = (i, { step }) => step ? ((i * 37) % 21 - 10) / 21 * Math.min(step * 0.5, 40) : 0;
  const last = emphasised(selection.rows).sort((i, j) => hasResult(i) - hasResult(j));  // rows with results are on top
  svg.classList.toggle("crowded", last.length > 200);
  for (const i of last) {
    const known = names.map((name, n) => [valueOf(i, name), scales[n], n]).filter(([value]) => value !== null);
    const points = known.map(([value, scale, n]) => `${(scale.at(value) + aside(i, scale)).toFixed(1)} ${height(n)}`);
    const kind = hasResult(i) ? "way" : "way none";
    mark(svg, "polyline", i, { class: kind, points: points.join(" "), stroke: colours.of(i) }, told(i, ...results));
  }
  names.forEach((name, n) => {
    add(svg, "path", { class: "grid strong", d: `M4 ${height(n)}H${width - 4}` });
    write(svg, 2, height(n) - 20, titleOf(name), { class: "axis over" });
    for (const [value, text] of scales[n].ticks) {
      const { at: x, step } = scales[n], kind = step ? "link over" : "over";
      const label = write(svg, x(value), height(n) - 6, cut(text, step ?? 70), { "text-anchor": "middle", class: kind });
      add(label, "title", {}, text);
      if (step) label.addEventListener("click", () => narrow([name, "=", text]));
    }
  });
  legend(box, colours.legend);
}

/** Return the name of a row without some keys, by default those that decide the number of devices. */
function nameOfRow(i, without = DATA.scales) {
  const given = keys.filter((key) => Object.hasOwn(rows[i].values, key) && !without.includes(key));
  const name = (key, value) => typeof value === "number" ? `${key.split(".").at(-1)}=${value}` : value;
  return given.map((key) => name(key, rows[i].values[key])).join(" ");
}

/** Draw the total tokens per second over the number of devices. Rows that differ only in this number share a line. */
function drawScaling() {
  const total = (i) => valueOf(i, "perf/wps") * rows[i].devices, lines = new Map();
  for (const i of measured("devices", measured("perf/wps"))) lines.set(nameOfRow(i), [...(lines.get(nameOfRow(i)) ?? []), i]);
  for (const line of lines.values()) line.sort((i, j) => rows[i].devices - rows[j].devices);
  const scaled = [...lines].filter(([, line]) => rows[line[0]].devices < rows[line.at(-1)].devices);
  scaled.sort(([, one], [, other]) => Math.max(...other.map(total)) - Math.max(...one.map(total)));
  const series = scaled.slice(0, COLOURS.length), left = scaled.length - series.length;
  const few = left ? `; the ${series.length} fastest lines of ${scaled.length}` : "";
  const about = "Tokens per second of all devices, by wall-clock time; dashed: ideal, twice as fast on twice as many devices";
  const line = ranges(series.flatMap(([, members]) => members), "perf/wps");
  if (!caption("scaling", about + few + (line && `; ${line}`), series.length)) return;
  const ideal = (line, count) => total(line[0]) / rows[line[0]].devices * count;
  const members = series.flatMap(([, line]) => line), devices = distinct(members.map((i) => rows[i].devices));
  const ends = (i) => endsOf(i, "perf/wps").map((speed) => speed * rows[i].devices);
  const reach = [...members.map(total), ...members.flatMap(ends), ...series.map(([, line]) => ideal(line, rows[line.at(-1)].devices))];
  const bottom = paper ? 150 : 310, { box, svg, width } = canvas("scaling", bottom + 50);
  const area = { left: 70, right: width - 20, top: 24, bottom };
  let x = linear(devices, area.left, area.right), y = linear([0, ...reach], area.bottom, area.top, { every: 45 });
  x.ticks = devices.map((count) => [count, brief(count)]);
  if (devices.at(-1) / devices[0] > 16) {
    const powers = Array.from({ length: 20 }, (_, n) => 10 ** n).filter((n) => n > Math.min(...reach) && n < Math.max(...reach));
    x = logarithmic(devices, area.left, area.right, devices);
    y = logarithmic(reach, area.bottom, area.top, powers);
  }
  axes(svg, area, x, y, "devices", "tokens per second");
  series.forEach(([, line], n) => {
    const last = rows[line.at(-1)].devices, place = (i) => [x.at(rows[i].devices), y.at(total(i))];
    add(svg, "polyline", { class: "ideal", points: [place(line[0]), [x.at(last), y.at(ideal(line, last))]].join(" ") });
    add(svg, "polyline", { class: "curve", points: line.map(place).join(" "), stroke: COLOURS[n] });
    for (const i of line) {
      const share = (100 * total(i) / ideal(line, rows[i].devices)).toFixed(1), fewest = rows[line[0]].devices;
      const text = `${told(i, "perf/wps")}\nscaling: ${share}% relative to ${fewest} device${fewest > 1 ? "s" : ""}`;
      interval(svg, i, COLOURS[n], place(i), [], ends(i).map(y.at));
      mark(svg, "path", i, { class: "point", d: shape(n, ...place(i), 5), fill: COLOURS[n] }, text);
    }
  });
  legend(box, series.map(([name], n) => [name || "these rows", COLOURS[n], n]));
}
