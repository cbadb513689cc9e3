// The marks, scales and colours of rows in drawings.

const RAMP = [[49, 80, 140], [42, 127, 158], [53, 165, 131], [140, 191, 74], [227, 194, 47]];  // colours from low to high values

/** Return attributes of a mark that represents a row. A click on the mark emphasises the row. */
const ofRow = (i, name = "") => ({ class: `${name} mark${selection.picked.has(i) ? " picked" : ""}`, "data-row": i });

/** Add a mark that represents a row. The mark's tooltip names the row. */
function mark(parent, name, i, attributes, about = "") {
  const element = add(parent, name, { ...attributes, ...ofRow(i, attributes.class) });
  add(element, "title", {}, `${i + 1}: ${rows[i].name}${about && `\n${about}`}`);
  return element;
}

const FIGURES = figures.map((figure) => [figure.key, figure.title]);
const KEYS = keys.map((key) => [key, key]);

/** Whether values need a continuous scale: values of a figure, or more than `most` distinct numbers of a setting. */
const isLine = (name, values, most) =>
  values.length && (figureOf(name) || (distinct(values).length > most && values.every((value) => typeof value === "number")));

/** Return [value, lowest, highest] of a figure over the runs of a row, or [value] of a setting. */
const rangeOf = (i, name) => rows[i].figures[name]?.map((value) => value ?? valueOf(i, name)) ?? [valueOf(i, name)];

/** If a row has several runs, draw their range at the row's point (x, y). across, up: the ends of the range in px, or []. */
function interval(svg, i, colour, [x, y], across, up) {
  const d = (across.length ? `M${across[0]} ${y}H${across[1]}` : "") + (up.length ? `M${x} ${up[0]}V${up[1]}` : "");
  if (d && rows[i].runs.length > 1) mark(svg, "path", i, { class: "range", d, style: `stroke: ${colour}` });
}

const endsOf = (i, name) => rangeOf(i, name).slice(1);

/** Explain the intervals of the figures `names`. */
function ranges(members, ...names) {
  const shown = names.filter((name) => figureOf(name) && members.some((i) => rows[i].runs.length > 1));
  const steps = (name) => /p10/.test(figureOf(name).column) ? "lowest p10 to highest p90" : "lowest to highest run";
  return shown.length ? `line: ${[...new Set(shown.map(steps))].join(", or ")}` : "";
}

function scaleOf(name, members, from, to) {
  const values = members.flatMap((i) => rangeOf(i, name));
  return isLine(name, values, 12) ? linear(values, from, to) : ordinal(values, from, to);
}

function titleOf(name) {
  const figure = figureOf(name);
  return figure ? figure.title + (figure.unit && `, ${figure.unit}`) : name;
}

// Colours.

/** Return { of(row): its colour, shape(row), legend } for a key or figure. A key's colours are the same for every selection. */
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

/** Return the colour at a position from 0 to 1 of the ramp. */
function ramp(share) {
  const place = share * (RAMP.length - 1), n = Math.min(Math.floor(place), RAMP.length - 2);
  return `rgb(${RAMP[n].map((part, k) => Math.round(part + (RAMP[n + 1][k] - part) * (place - n))).join(" ")})`;
}

/** Return "black" or "white", whichever is more readable on a colour of the ramp. */
function onTop(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map(Number);
  return 0.3 * red + 0.6 * green + 0.1 * blue > 120 ? "black" : "white";
}
