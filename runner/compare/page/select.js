"use strict";
// What is shown: the rows that a typed filter leaves, in the table's order. The table and every chart follow it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const { rows, runs, keys, figures } = DATA;
const byId = (id) => document.getElementById(id);
const figureOf = (name) => figures.find((figure) => figure.key === name);
const NAMES = [...new Set(["state", ...keys, ...figures.map((figure) => figure.key), "devices", ...DATA.settings])];

const selection = {
  order: rows.map((_, i) => i),  // as the table is sorted
  rows: [],                      // those of them that the filter leaves
  picked: new Set(),             // those that were clicked: emphasised everywhere
};

/** A value of a row: a number, a text, or null where it is not known. */
function valueOf(i, name) {
  const row = rows[i], place = DATA.settings.indexOf(name);
  if (name === "state" || name === "devices") return row[name];
  if (Object.hasOwn(row.values, name)) return row.values[name];
  if (figureOf(name)) return row.figures[name]?.[0] ?? null;
  const text = DATA.texts[runs[row.runs[0]][place]] ?? null;
  return isNumber(text) ? Number(text) : text;
}

const isNumber = (text) => text !== null && `${text}`.trim() !== "" && isFinite(text);

/** The one name that is meant: whole, by its last part, or by the beginning of that; raises Error. */
function nameOf(typed) {
  const last = (name) => name.split(/[./]/).at(-1);
  const ways = [(name) => name === typed, (name) => last(name) === typed, (name) => last(name).startsWith(typed), (name) => name.startsWith(typed)];
  for (const means of ways) {
    const found = NAMES.filter(means), varying = found.filter((name) => keys.includes(name));
    if (found.length === 1 || varying.length === 1) return (varying.length === 1 ? varying : found)[0];
    if (found.length > 1) throw Error(`${typed} may be ${listed(found)}`);
  }
  throw Error(`no key ${typed}; there are ${listed(NAMES)}`);
}

const listed = (names) => names.slice(0, 8).join(", ") + (names.length > 8 ? ", ..." : "");

const COMPARE = { "=": (a, b) => a === b, "!=": (a, b) => a !== b, ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b };

/** `lr>=1e-3` as a test of a row; raises Error. Numbers compare as numbers, text as text; = takes several, `a,b`. */
function testOf(typed, how, wanted) {
  const name = nameOf(typed);
  if (how.includes("<") || how.includes(">")) {
    const limit = wanted.replaceAll(",", "");
    if (!isNumber(limit)) throw Error(`${typed}${how}${wanted}: ${wanted} is not a number`);
    return (i) => typeof valueOf(i, name) === "number" && COMPARE[how](valueOf(i, name), Number(limit));
  }
  const same = (value, text) => typeof value === "number" && isNumber(text) ? value === Number(text) : `${value ?? ""}`.toLowerCase() === text.toLowerCase();
  const any = (i) => [wanted, ...wanted.split(",")].some((text) => same(valueOf(i, name), text));
  return how === "=" ? any : (i) => !any(i);
}

/** The tests that a filter consists of, and what is wrong with it. Quotes keep words together. */
function parse(filter) {
  const tests = [], problems = [];
  for (const quoted of filter.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? []) {
    const word = quoted.replaceAll('"', ""), term = word.match(/^([^=<>!]+)(!=|>=|<=|=|>|<)(.*)$/);
    try {
      if (!term) tests.push((i) => textOf(i).includes(word.toLowerCase()));
      else if (term[3] !== "") tests.push(testOf(term[1], term[2], term[3]));  // else it is still being typed
    } catch (error) {
      problems.push(error.message);
    }
  }
  return { tests, problems };
}

/** Rows that ended with a figure. */
const measured = (name, among = selection.rows) => among.filter((i) => valueOf(i, name) !== null);

/** Whether rows do the same work for a token: else none of them is the fastest. */
const comparable = (members) => DATA.workload.every((key) => new Set(members.map((i) => rows[i].values[key])).size <= 1);

/** The row with the best value of a figure; undefined where none is known, or rows are not to be compared. */
function best(name) {
  const members = measured(name), sign = figureOf(name)?.better;
  return comparable(members) ? members.sort((a, b) => sign * (valueOf(b, name) - valueOf(a, name)))[0] : undefined;
}

/** Rows than which no other is better in one of two figures and as good in the other, by the first. */
function front(one, other) {
  const members = measured(one, measured(other));
  if (!figureOf(one) || !figureOf(other) || one === other || !comparable(members)) return [];
  const goodness = (i) => [one, other].map((name) => figureOf(name).better * valueOf(i, name));
  const beats = ([a, b], [c, d]) => a >= c && b >= d && (a > c || b > d);
  return members.filter((i) => !members.some((j) => beats(goodness(j), goodness(i)))).sort((i, j) => valueOf(i, one) - valueOf(j, one));
}

/** Select by what is typed, and draw everything anew. */
function select() {
  const { tests, problems } = parse(byId("filter").value);
  selection.rows = selection.order.filter((i) => tests.every((test) => test(i)));
  byId("shown").textContent = tests.length ? `${selection.rows.length} of ${rows.length} rows` : `${rows.length} rows`;
  byId("problem").textContent = problems.join("; ");
  history.replaceState(null, "", byId("filter").value ? `#${encodeURIComponent(byId("filter").value)}` : location.pathname);
  redraw();
}

/** Add terms to the filter, in place of what it says about their keys; one that is there already is taken away. */
function narrow(...terms) {
  const quoted = terms.map(([name, how, value]) => /\s/.test(value) ? `${name}${how}"${value}"` : `${name}${how}${value}`);
  const words = byId("filter").value.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? [];
  const others = words.filter((word) => !terms.some(([name]) => /^[=<>!]/.test(word.slice(name.length)) && word.startsWith(name)));
  byId("filter").value = [...others, ...quoted.filter((word) => !words.includes(word))].join(" ");
  select();
}

/** Emphasise a row, or no longer. */
function pick(i) {
  selection.picked.delete(i) || selection.picked.add(i);
  redraw();
}
