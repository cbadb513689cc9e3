// What rows were like over their steps and over their ranks: losses, step times, figures by rank.

const CURVES = 20, FEW = 8;

/** The rows with a curve that are drawn: the clicked ones, or as many as one can tell apart, in the table's order. */
function curved(has, most = CURVES) {
  const known = selection.rows.filter(has), clicked = known.filter((i) => selection.picked.has(i));
  const members = (clicked.length ? clicked : known).slice(0, most);
  const why = members.length === known.length ? "" : clicked.length ? "; of the rows that were clicked" : `; the first ${most} of ${known.length} rows, a click on rows chooses others`;
  return { members, why };
}

const pairs = ([axis, values]) => DATA.steps[axis].map((step, k) => [step, values[k]]);
const styleOf = (n) => ({ stroke: at(COLOURS, n), "stroke-dasharray": at(DASHES, Math.floor(n / COLOURS.length)) });

/** A curve of each of some rows: lines[n] are its [x, y]. */
function lines(svg, members, points, x, y) {
  members.forEach((i, n) => {
    const place = points[n].map(([step, value]) => `${x.at(step).toFixed(1)} ${y.at(value).toFixed(1)}`);
    if (place.length === 1) mark(svg, "path", i, { d: shape(0, ...place[0].split(" ").map(Number), 4), fill: at(COLOURS, n), class: "point" });
    else if (place.length) mark(svg, "polyline", i, { class: "curve", points: place.join(" "), ...styleOf(n) });
  });
}

const namesOf = (members) => members.map((i, n) => [`${i + 1}: ${rows[i].name}`, at(COLOURS, n), Math.floor(n / COLOURS.length), i]);

function drawLosses() {
  const { members, why } = curved((i) => rows[i].losses), points = members.map((i) => pairs(rows[i].losses));
  const apart = members.map((i, n) => {
    const base = rows[i].completed && rows[rows[i].baseline]?.completed && rows[rows[i].baseline].losses, known = new Map(base ? pairs(base) : []);
    return points[n].filter(([step]) => known.has(step)).map(([step, value]) => [step, (value - known.get(step)) / known.get(step)]);
  });
  const compared = apart.some((each) => each.length);
  if (!caption("losses", `Loss over steps${compared ? `, and below it the relative difference from ${DATA.baseline}` : ""}${why}`, members.length)) return;
  const high = paper ? 230 : 330, { box, svg, width } = canvas("losses", high + (compared ? 230 : 50));
  const upper = { left: 70, right: width - 10, top: 24, bottom: high }, lower = { ...upper, top: high + 70, bottom: high + 180 };
  const x = linear(points.flat().map(([step]) => step), upper.left, upper.right, { pad: 0 });
  const y = linear(points.flat().map(([, value]) => value), upper.bottom, upper.top, { every: 45 });
  axes(svg, upper, x, y, "step", "loss");
  lines(svg, members, points, x, y);
  if (compared) {
    const difference = linear([0, ...apart.flat().map(([, value]) => value)], lower.bottom, lower.top, { every: 40 });
    axes(svg, lower, x, difference, "step", "relative difference");
    lines(svg, members, apart, x, difference);
  }
  legend(box, namesOf(members));
}

function drawTimes() {
  const { members, why } = curved((i) => rows[i].times, FEW), points = members.map((i) => pairs(rows[i].times));
  if (!caption("times", `Time of the steps that count, the slowest rank's, and how often it took how long${why}`, members.length)) return;
  const { box, svg, width } = canvas("times", 370), area = { left: 70, right: Math.round(width * 0.72), top: 24, bottom: 320 };
  const beside = { ...area, left: area.right + 12, right: width - 10 }, histograms = members.map((i) => rows[i].histogram);
  const x = linear(points.flat().map(([step]) => step), area.left, area.right, { pad: 0, every: 90 });
  const seconds = [...points.flat().map(([, value]) => value), ...histograms.filter(Boolean).flatMap(([low, high]) => [low, high])];
  const y = linear(seconds, area.bottom, area.top, { every: 45 });
  axes(svg, area, x, y, "step", "step time, s");
  lines(svg, members, points, x, y);
  const most = Math.max(...histograms.filter(Boolean).flatMap(([, , shares]) => shares), 0);
  if (most) {
    axes(svg, beside, null, null, "steps", "");
    const wide = (share) => beside.left + (beside.right - beside.left) * share / most;
    members.forEach((i, n) => {
      if (!histograms[n]) return;
      const [low, high, shares] = histograms[n], edge = (k) => y.at(low + (high - low) * k / shares.length).toFixed(1);
      const steps = shares.flatMap((share, k) => [`${wide(share).toFixed(1)} ${edge(k)}`, `${wide(share).toFixed(1)} ${edge(k + 1)}`]);
      mark(svg, "polyline", i, { class: "curve", points: [`${wide(0)} ${edge(0)}`, ...steps, `${wide(0)} ${edge(shares.length)}`].join(" "), ...styleOf(n) });
    });
  }
  legend(box, namesOf(members));
}

/** A tick for each rank; the last one is named. */
function drawRanks() {
  if (!caption("ranks", "", DATA.by_rank.length)) return;
  const name = choice("ranks", "Every rank's", DATA.by_rank.map((figure) => [figure.key, figure.title]), DATA.by_rank[0].key);
  const { members, why } = curved((i) => rows[i].ranks[name]), figure = DATA.by_rank.find((each) => each.key === name);
  const values = (i) => rows[i].ranks[name].map(([, value]) => value), middle = (i) => values(i)[Math.floor((values(i).length - 1) / 2)];
  if (!caption("ranks", why.slice(2), members.length)) return;
  strips("ranks", members, values, (svg, i, x, y) => {
    for (const [rank, value] of rows[i].ranks[name]) {
      const tick = mark(svg, "line", i, { class: "tick", x1: x.at(value), x2: x.at(value), y1: y - 5, y2: y + 5 });
      tick.firstChild.textContent = `rank ${rank}: ${brief(value)} ${figure.unit}`;
    }
    const [rank, value] = rows[i].ranks[name].at(-1), more = middle(i) ? ` +${(100 * (value / middle(i) - 1)).toFixed(1)}%` : "";
    if (rows[i].ranks[name].length > 1) write(svg, Math.min(x.at(value) + 6, x.at(value) + 6), y + 4, `${rank}${more}`);
  }, `${figure.title}, ${figure.unit}; named: the last rank, against the median one`);
}
