// The table: sorting, columns, emphasis, marks of the best rows, and copying as Markdown.

const table = byId("table"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
const titles = heads.map((head) => head.textContent);
const lineOf = [...body.rows];  // index of a row -> line of the table
const hidden = new Set();       // indices of hidden columns
const foldStyle = add(document.head, "style"), pinStyle = add(document.head, "style");
let unfolded = false;           // whether the reader asked for all columns

const cellOf = (i, title) => lineOf[i].cells[titles.indexOf(title)]?.textContent ?? "";
const cells = (column, part = "") => `#table ${part} tr > :nth-child(${column + 1})`;
const room = () => table.parentElement.clientWidth;
const textOf = (i) => (lineOf[i].searched ??= lineOf[i].textContent.toLowerCase());

/** Return the number at the start of a cell, or else its text. */
const sortKey = (text) => text.match(/^(?:agrees \()?([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)/)?.[1].replaceAll(",", "") ?? text;

/** Sort the table by a column: ascending on the first click, then descending. Unknown values are always last. */
function sortBy(column) {
  const down = heads[column].getAttribute("aria-sort") === "ascending" ? -1 : 1;
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
  const by = (line) => sortKey(line.cells[column].textContent.trim());
  const compare = (a, b) => isNumber(a) && isNumber(b) ? a - b : a.localeCompare(b);
  const sorted = [...body.rows].sort((a, b) => (by(a) === "") - (by(b) === "") || down * compare(by(a), by(b)));
  body.append(...sorted);
  selection.order = sorted.map((line) => Number(line.dataset.row));
  select();
}

/**
 * Hide the columns that the reader unchecked. Unless the reader asked for all columns, fold the columns that do not fit.
 * First, the row's name replaces the columns of settings and state. Columns of the class `leads` are never folded.
 */
function foldColumns() {
  const shown = heads.map((_, column) => column).filter((column) => !hidden.has(column));
  const ofClass = (name) => shown.filter((column) => heads[column].classList.contains(name));
  const hide = (columns, media) => `@media ${media} { ${columns.map((column) => `${cells(column)} { display: none }`).join(" ")} }`;
  const widths = (columns) => columns.reduce((sum, column) => sum + heads[column].offsetWidth, 0);
  const named = [0, ...ofClass("key"), ...ofClass("leads")], others = shown.filter((column) => !named.includes(column));
  foldStyle.textContent = hide([...hidden], "all");
  table.classList.remove("named", "all");
  table.style.width = "min-content";  // the narrowest widths
  table.classList.toggle("named", widths(named) > room());
  let left = room() - widths(named);
  const folded = others.filter((column) => (left -= heads[column].offsetWidth) < 0);
  table.style.width = "";
  table.classList.toggle("all", unfolded);
  if (!unfolded) foldStyle.textContent += hide(folded, "screen");
  byId("fold").hidden = !folded.length;
  byId("fold").setAttribute("aria-expanded", unfolded);
  byId("fold").textContent = unfolded ? "Fewer columns" : `${folded.length} more column${folded.length > 1 ? "s" : ""}`;
  pinColumns();
}

/** Keep the name of a row and the leading columns in view while the table is scrolled. 180 px remain for the other columns. */
function pinColumns() {
  const rules = [], pinned = [];
  let left = 0, right = 0;
  heads.forEach((head, column) => {
    if (!head.matches(":first-child, .key, .leads") || left + head.offsetWidth > room() - 180) return;
    pinned.unshift([column, left]);
    left += head.offsetWidth;
  });
  for (const [column, from] of pinned) {
    const to = heads[column].matches(".leads") ? `right: ${right}px` : "";
    rules.push(`${cells(column)} { position: sticky; left: ${from}px; ${to}; z-index: 1; background: var(--back) }`);
    rules.push(`${cells(column, "thead")} { z-index: 3; background: var(--raised) }`);
    right += heads[column].offsetWidth;
  }
  pinStyle.textContent = `@media screen { ${rules.join("\n")} }`;
}

/** Add checkboxes that hide columns, and checkboxes that emphasise lines. */
function prepareTable() {
  byId("fold").addEventListener("click", () => {
    unfolded = !unfolded;
    foldColumns();
  });
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortBy(column));
    if (column === 0) return;
    const label = add(byId("columns"), "label"), input = add(label, "input", { type: "checkbox", checked: "" });
    add(label, "span", {}, titles[column]);
    input.addEventListener("change", () => {
      hidden[input.checked ? "delete" : "add"](column);
      foldColumns();
    });
  });
  lineOf.forEach((line, i) => {
    const input = add(line.cells[0], "input", { type: "checkbox", "aria-label": `emphasise row ${i + 1}` });
    line.cells[0].prepend(input, " ");
    input.addEventListener("change", () => pick(i));
    line.cells[0].querySelector("a").addEventListener("click", () => {  // unfold the runs to which the link leads
      byId("runs").open = true;
      for (const run of byId(`row-${i + 1}`).querySelectorAll("details")) run.open = true;
    });
  });
}

function drawTable() {
  const shown = new Set(selection.rows), lean = DATA.memory;
  const marks = [
    ["\u25b2", "fastest", [best(DATA.speed)]],
    ["\u25bc", "least memory", lean ? [best(lean)] : []],
    ["\u25c6", "no other row is faster and needs less memory", lean ? front(lean, DATA.speed) : []],
  ];
  lineOf.forEach((line, i) => {
    const cell = line.cells[0], picked = selection.picked.has(i);
    line.hidden = byId(`row-${i + 1}`).hidden = !shown.has(i);
    line.classList.toggle("picked", picked);
    cell.querySelector("input").checked = picked;
    cell.dataset.marks = marks.filter(([, , members]) => members.includes(i)).map(([sign]) => sign).join("");
    cell.classList.toggle("untested", !rows[i].tested);
  });
  const members = marks.flatMap(([, , of]) => of).filter((i) => i !== undefined);
  const said = marks.filter(([, , of]) => of.some((i) => i !== undefined)).map(([sign, text]) => `${sign} ${text}`);
  if (members.some((i) => !rows[i].tested)) said.push("grey: too few runs for a test");
  pinColumns();
  byId("marks").textContent = members.length && rows.length > 1 ? `among the rows shown: ${said.join(", ")}` : "";
}

/** Return the selected rows as Markdown for a pull request: findings, table, explanations. */
function markdown() {
  const columns = titles.map((_, column) => column).filter((column) => column && !hidden.has(column));
  const plain = (text) => text.trim().replace(/\s+/g, " ").replace(/(\\*)\|/g, "$1$1\\|");
  const texts = [titles, ...selection.rows.map((i) => [...lineOf[i].cells].map((cell) => cell.textContent))];
  const lines = texts.map((cells) => columns.map((column) => plain(cells[column])));
  const widths = columns.map((_, n) => Math.max(...lines.map((cells) => cells[n].length)));
  const joined = lines.map((cells) => `| ${cells.map((cell, n) => cell.padEnd(widths[n])).join(" | ")} |`);
  joined.splice(1, 0, `|${widths.map((width) => "-".repeat(width + 2)).join("|")}|`);
  const filter = byId("filter").value.trim(), some = selection.rows.length < rows.length;
  const blocks = [
    some && DATA.verdict.length ? [`Of all ${rows.length} rows:`, ...DATA.verdict] : DATA.verdict,
    some ? [`The ${selection.rows.length} of them with \`${filter}\`:`] : [],
    joined,
    [...DATA.below, ...DATA.notes].map((line) => `- ${line}`),
  ];
  return `${blocks.filter((block) => block.length).map((block) => block.join("\n")).join("\n\n")}\n`;
}

/** Copy the Markdown to the clipboard. If the browser forbids this, select the text in a box for the user to copy. */
async function copy() {
  const text = markdown(), box = byId("copied");
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    box.value = text;
    box.hidden = false;
    box.select();
    done = document.execCommand("copy");
    box.hidden = done;
  }
  byId("copy").textContent = done ? "Copied" : "Copy it from the box below";
  setTimeout(() => { byId("copy").textContent = "Copy for a pull request"; }, 3000);
}
