// The selection: the rows that meet the filter, in the table's order. The table and every chart show the selection.

const DATA = JSON.parse(byId("data").textContent);
const { rows, keys, figures } = DATA;
const figureOf = (name) => figures.find((figure) => figure.key === name);
const isNumber = (text) => text !== null && `${text}`.trim() !== "" && isFinite(text);

const selection = {
  order: rows.map((_, i) => i),  // all rows, in the table's order
  rows: [],                      // the rows that meet the filter, in the table's order
  picked: new Set(),             // clicked rows, emphasised in the table and all charts
};

/** Return a value of a row: a number, a text, or null if the value is unknown. */
function valueOf(i, name) {
  const row = rows[i];
  if (name === "state" || name === "devices") return row[name];
  if (Object.hasOwn(row.values, name)) return row.values[name];
  if (figureOf(name)) return row.figures[name]?.[0] ?? null;
  const text = DATA.texts[DATA.runs[row.runs[0]][DATA.settings.indexOf(name)]] ?? null;
  return isNumber(text) ? Number(text) : text;
}

/** Return whether a row has a speed: it completed or, on a page of predictions, it is predicted to fit. */
const hasResult = (i) => valueOf(i, DATA.speed) !== null;

/** Return the rows that have a value for the key or figure `name`. */
const measured = (name, among = selection.rows) => among.filter((i) => valueOf(i, name) !== null);

// The filter: `parallelism=fsdp2 wps>5000 state!=completed some words`.

const NAMES = [...new Set(["state", "devices", ...keys, ...figures.map((figure) => figure.key), ...DATA.settings])];
const WORDS = /(?:[^\s"]|"[^"]*"?)+/g;  // quotes keep words together
const ORDERS = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b };

/** Return the full name. typed: full name, its last part, or the beginning of either; throw Error if unknown or ambiguous. */
function nameOf(typed) {
  const last = (name) => name.split(/[./]/).at(-1), listed = (names) => names.slice(0, 8).join(", ");
  const meanings = [
    (name) => name === typed,
    (name) => last(name) === typed,
    (name) => last(name).startsWith(typed) || name.startsWith(typed),
  ];
  for (const means of meanings) {
    const all = NAMES.filter(means), own = all.filter((name) => !name.startsWith("plan/"));  // prefer measured figures
    const found = own.length ? own : all, varying = found.filter((name) => keys.includes(name));
    if (found.length === 1 || varying.length === 1) return varying[0] ?? found[0];
    if (found.length > 1) throw Error(`${typed} may be ${listed(found)}`);
  }
  throw Error(`no key ${typed}; known keys: ${listed(NAMES)}`);
}

/** Return a function that tests a row for a condition: `lr>=1e-3` or `lr=1e-3,1e-4`. Throw Error if the condition is wrong. */
function testOf(typed, how, wanted) {
  const name = nameOf(typed);
  if (how in ORDERS) {
    const limit = wanted.replaceAll(",", "");
    if (!isNumber(limit)) throw Error(`${typed}${how}${wanted}: ${wanted} is not a number`);
    return (i) => typeof valueOf(i, name) === "number" && ORDERS[how](valueOf(i, name), Number(limit));
  }
  const same = (value, text) => typeof value === "number" && isNumber(text)
    ? value === Number(text) : `${value ?? ""}`.toLowerCase() === text.toLowerCase();
  const any = (i) => [wanted, ...wanted.split(",")].some((text) => same(valueOf(i, name), text));
  return how === "=" ? any : (i) => !any(i);
}

/** Return the tests that a filter consists of, and messages about its mistakes. */
function parse(filter) {
  const tests = [], problems = [];
  for (const quoted of filter.match(WORDS) ?? []) {
    const word = quoted.replaceAll('"', ""), term = word.match(/^([^=<>!]+)(!=|>=|<=|=|>|<)(.*)$/);
    try {
      if (!term) tests.push((i) => textOf(i).includes(word.toLowerCase()));
      else if (term[3] !== "") tests.push(testOf(...term.slice(1)));  // otherwise the user is still typing the value
    } catch (error) {
      problems.push(error.message);
    }
  }
  return { tests, problems };
}

/** Apply the filter and redraw everything. */
function select() {
  const filter = byId("filter").value, { tests, problems } = parse(filter);
  selection.rows = selection.order.filter((i) => tests.every((test) => test(i)));
  byId("shown").textContent = `${tests.length ? `${selection.rows.length} of ` : ""}${rows.length} rows`;
  byId("problem").textContent = problems.join("; ");
  redraw();
  try {  // keep the filter in the address, for a reload
    history.replaceState(null, "", filter ? `#${encodeURIComponent(filter)}` : location.pathname + location.search);
  } catch { /* a page in a frame may not change the address */ }
}

/** Replace the filter's terms about the same names by terms [name, operator, value]. Remove a term that is already there. */
function narrow(...terms) {
  const words = byId("filter").value.match(WORDS) ?? [];
  const typed = terms.map(([name, how, value]) => name + how + (/\s/.test(value) ? `"${value}"` : value));
  const about = (word, [name]) => word.startsWith(name) && /^[=<>!]/.test(word.slice(name.length));
  const others = words.filter((word) => !terms.some((term) => about(word, term)));
  byId("filter").value = [...others, ...typed.filter((word) => !words.includes(word))].join(" ");
  select();
}

/** Toggle the emphasis of a row. */
function pick(i) {
  selection.picked.delete(i) || selection.picked.add(i);
  redraw();
}

// The best of the selected rows.

/** Whether all rows do the same work per token. Otherwise, no row is called the fastest. */
const comparable = (members) =>
  DATA.workload.every((key) => new Set(members.map((i) => rows[i].values[key])).size <= 1);

/** Return rows sorted by a figure, the best row first. */
function ranked(name, members) {
  const sign = figureOf(name)?.better;
  return [...members].sort((i, j) => sign * (valueOf(j, name) - valueOf(i, name)));
}

/** Return the row with the best value of a figure; undefined if no row has a value or the rows are not comparable. */
function best(name) {
  const members = measured(name);
  return comparable(members) ? ranked(name, members)[0] : undefined;
}

/** Return the Pareto-optimal rows of two figures, sorted by the first figure; [] if the rows are not comparable. */
function front(one, other) {
  const members = measured(one, measured(other));
  if (!figureOf(one) || !figureOf(other) || one === other || !comparable(members)) return [];
  const goods = new Map(members.map((i) => [i, [one, other].map((name) => figureOf(name).better * valueOf(i, name))]));
  const beats = ([a, b], [c, d]) => a >= c && b >= d && (a > c || b > d);
  const optimal = members.filter((i) => !members.some((j) => beats(goods.get(j), goods.get(i))));
  return optimal.sort((i, j) => valueOf(i, one) - valueOf(j, one));
}
