// Charts over steps and ranks: losses, step times, figures by rank.

const CURVES = 20, FEW = 8;

/** Return the rows whose curves are drawn, in the table's order: the clicked rows, or else the first `most` rows. */
function curved(has, most = CURVES) {
  const known = selection.rows.filter(has), clicked = known.filter((i) => selection.picked.has(i));
  const members = (clicked.length ? clicked : known).slice(0, most);
  if (members.length === known.length) return { members, why: "" };
  const first = `; the first ${most} of ${known.length} rows; click rows to choose others`;
  return { members, why: clicked.length ? "; the rows that were clicked" : first };
}

const pairs = ([axis, values]) => DATA.steps[axis].map((step, k) => [step, values[k]]);
const firsts = (points) => points.flat().map(([step]) => step);
const seconds = (points) => points.flat().map(([, value]) => value);
const round = (number) => Number(number.toFixed(1));
const styleOf = (n) => ({ stroke: at(COLOURS, n), "stroke-dasharray": at(DASHES, Math.floor(n / COLOURS.length)) });
const legendOf = (members) =>
  members.map((i, n) => [`${i + 1}: ${rows[i].name}`, at(COLOURS, n), Math.floor(n / COLOURS.length), ofRow(i)]);

/** Draw a curve for each row through the row's points [x, y]. */
function lines(svg, members, points, x, y) {
  members.forEach((i, n) => {
    const place = points[n].map(([step, value]) => [round(x.at(step)), round(y.at(value))]);
    if (place.length > 1) mark(svg, "polyline", i, { class: "curve", points: place.join(" "), ...styleOf(n) });
    else if (place.length) mark(svg, "path", i, { class: "point", d: shape(0, ...place[0], 4), fill: at(COLOURS, n) });
  });
}

/** Return [step, relative difference of a row's loss from the loss of its baseline] for each step that both curves have. */
function apartFromBaseline(i, key) {
  const base = rows[rows[i].baseline];
  if (!base?.[key] || !base.completed || !rows[i].completed) return [];
  const known = new Map(pairs(base[key])), common = pairs(rows[i][key]).filter(([step]) => known.has(step));
  return common.map(([step, value]) => [step, (value - known.get(step)) / known.get(step)]);
}

/** Draw the curves of `losses` or `held_out`. */
function drawLosses(key, title) {
  const { members, why } = curved((i) => rows[i][key]), points = members.map((i) => pairs(rows[i][key]));
  const apart = members.map((i) => apartFromBaseline(i, key)), known = apart.flat();
  const compared = known.some(([, difference]) => difference);
  const below = compared ? `, and below it the relative difference from ${DATA.baseline}`
    : known.length ? `; no difference from ${DATA.baseline}` : "";
  if (!caption(key, `${title} over steps${below}${why}`, members.length)) return;
  const high = paper ? 120 : 330, deep = paper ? 40 : 110, { box, svg, width } = canvas(key, high + (compared ? deep + 120 : 50));
  const area = { left: 70, right: width - 10, top: 24, bottom: high };
  const x = linear(firsts(points), area.left, area.right, { pad: 0 });
  const y = linear(seconds(points), area.bottom, area.top, { every: 45 });
  axes(svg, area, x, y, "step", "loss");
  lines(svg, members, points, x, y);
  if (compared) {
    const lower = { ...area, top: high + 70, bottom: high + 70 + deep };
    const difference = linear([0, ...seconds(apart)], lower.bottom, lower.top, { every: 28 });
    axes(svg, lower, x, difference, "step", "relative difference");
    lines(svg, members, apart, x, difference);
  }
  legend(box, legendOf(members));
}

const drawTrained = () => drawLosses("losses", "Loss"), drawHeldOut = () => drawLosses("held_out", "Held-out loss");

function drawTimes() {
  const { members, why } = curved((i) => rows[i].times, FEW), points = members.map((i) => pairs(rows[i].times));
  const histograms = members.map((i) => rows[i].histogram), counted = histograms.filter(Boolean);
  const often = counted.length ? ", and its distribution" : "";
  if (!caption("times", `Time of the slowest rank in measured steps${often}${why}`, members.length)) return;
  const bottom = paper ? 180 : 320, { box, svg, width } = canvas("times", bottom + 50), ends = counted.flatMap(([low, high]) => [low, high]);
  const area = { left: 70, right: counted.length ? Math.round(width * 0.72) : width - 10, top: 24, bottom };
  const x = linear(firsts(points), area.left, area.right, { pad: 0, every: 90 });
  const y = linear([...seconds(points), ...ends], area.bottom, area.top, { every: 45 });
  axes(svg, area, x, y, "step", "step time, s");
  lines(svg, members, points, x, y);
  if (counted.length) drawHistograms(svg, members, histograms, { left: area.right + 12, right: width - 10, bottom, ...y });
  legend(box, legendOf(members));
}

/** Draw the outlines of histograms to the right of the curves, on the same axis of step times. */
function drawHistograms(svg, members, histograms, { left, right, bottom, at: y }) {
  const most = Math.max(...histograms.filter(Boolean).flatMap(([, , shares]) => shares));
  const x = (share) => round(left + (right - left) * share / most);
  members.forEach((i, n) => {
    if (!histograms[n]) return;
    const [low, high, shares] = histograms[n], edge = (k) => round(y(low + (high - low) * k / shares.length));
    const steps = shares.flatMap((share, k) => [[x(share), edge(k)], [x(share), edge(k + 1)]]);
    const points = [[left, edge(0)], ...steps, [left, edge(shares.length)]];
    mark(svg, "polyline", i, { class: "curve", points: points.join(" "), ...styleOf(n) });
  });
  write(svg, right, bottom + 30, "steps", { "text-anchor": "end", class: "axis" });
}

/** Draw a tick for each rank and name the rank with the highest value. */
function drawRanks() {
  if (!caption("ranks", "", DATA.by_rank.length)) return;
  const options = DATA.by_rank.map((figure) => [figure.key, figure.title]);
  const name = choice("ranks", "Every rank's", options, options[0][0]), figure = DATA.by_rank.find((each) => each.key === name);
  const { members, why } = curved((i) => rows[i].ranks[name]);
  if (!caption("ranks", `+%: how far the highest value exceeds the median over ranks${why}`, members.length)) return;
  strips("ranks", members, (i) => rows[i].ranks[name].map(([, value]) => value), (svg, i, x, y) => {
    const ranks = rows[i].ranks[name], [last, highest] = ranks.at(-1), [, middle] = ranks[Math.floor((ranks.length - 1) / 2)];
    for (const [rank, value] of ranks) {
      const tick = mark(svg, "path", i, { class: "tick", d: `M${x.at(value)} ${y - 5}v10` });
      tick.firstChild.textContent = `rank ${rank}: ${brief(value)} ${figure.unit}`;
    }
    const more = middle ? ` +${(100 * (highest / middle - 1)).toFixed(1)}%` : "";
    if (ranks.length > 1) write(svg, x.at(highest) + 6, y + 4, `${last}${more}`);
  }, `${figure.title}, ${figure.unit}`);
}
