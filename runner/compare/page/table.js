// The table: sorting, columns, emphasis, marks of the best rows, and itself as Markdown.

const table = byId("table"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
const lineOf = [...body.rows];  // by the number of their row
const titles = heads.map((head) => head.textContent);
const hidden = new Set();       // numbers of columns
const style = add(document.head, "style");

const cellOf = (i, title) => lineOf[i].cells[titles.indexOf(title)]?.textContent ?? "";
const textOf = (i) => (lineOf[i].searched ??= lineOf[i].textContent.toLowerCase());

/** Sort by a column, upwards and then downwards; what is unknown stays last. */
function sortBy(column) {
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const by = (row) => row.cells[column].dataset.by;
  const compare = (a, b) => isNumber(a) && isNumber(b) ? a - b : a.localeCompare(b);
  body.append(...[...body.rows].sort((a, b) => (by(a) === "") - (by(b) === "") || (down ? -1 : 1) * compare(by(a), by(b))));
  selection.order = [...body.rows].map((row) => Number(row.dataset.row));
  select();
}

/** Rules for whole columns: hidden ones, and the keys that stay while the others move, as far as half the room goes. */
function styleColumns() {
  const nth = (column) => `#table tr > :nth-child(${column + 1})`;
  style.textContent = [...hidden].map((column) => `${nth(column)} { display: none }`).join("\n");
  let left = heads[0].offsetWidth;
  heads.forEach((head, column) => {
    if (!head.classList.contains("key") || !head.offsetWidth || left + head.offsetWidth > table.parentElement.clientWidth / 2) return;
    style.textContent += `\n@media screen { ${nth(column)} { position: sticky; left: ${left}px; z-index: 1; background: var(--back) } #table thead > tr > :nth-child(${column + 1}) { z-index: 3; background: var(--raised) } }`;
    left += head.offsetWidth;
  });
}

/** Boxes to hide columns with, and a box in every line to emphasise it. */
function prepareTable() {
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortBy(column));
    if (column === 0) return;
    const label = add(byId("columns"), "label"), input = add(label, "input", { type: "checkbox", checked: "" });
    add(label, "span", {}, titles[column]);
    input.addEventListener("change", () => { hidden[input.checked ? "delete" : "add"](column); styleColumns(); });
  });
  lineOf.forEach((line, i) => {
    const input = document.createElement("input");
    input.type = "checkbox";
    input.ariaLabel = `emphasise row ${i + 1}`;
    line.cells[0].prepend(input, " ");
    input.addEventListener("change", () => pick(i));
    line.cells[0].querySelector("a").addEventListener("click", () => {
      byId("runs").open = true;
      for (const run of byId(`row-${i + 1}`).querySelectorAll("details")) run.open = true;
    });
  });
}

function drawTable() {
  const shown = new Set(selection.rows), fastest = best(DATA.speed), leanest = DATA.memory ? best(DATA.memory) : undefined;
  const optimal = DATA.memory ? new Set(front(DATA.memory, DATA.speed)) : new Set();
  lineOf.forEach((line, i) => {
    const marks = [["\u25b2", i === fastest], ["\u25bc", i === leanest], ["\u25c6", optimal.has(i)]].filter(([, is]) => is).map(([sign]) => sign);
    line.hidden = !shown.has(i);
    line.classList.toggle("picked", selection.picked.has(i));
    line.cells[0].querySelector("input").checked = selection.picked.has(i);
    line.cells[0].dataset.marks = marks.join("");
    line.cells[0].classList.toggle("untested", !rows[i].tested);
    byId(`row-${i + 1}`).hidden = !shown.has(i);
  });
  const tested = [fastest, leanest].every((i) => i === undefined || rows[i].tested) ? "" : "; grey: of fewer runs than a test takes";
  const said = [fastest !== undefined && "\u25b2 fastest", leanest !== undefined && "\u25bc least memory", optimal.size && "\u25c6 no row is both faster and leaner"].filter(Boolean);
  byId("marks").textContent = said.length && rows.length > 1 ? `of the rows shown: ${said.join(", ")}${tested}` : "";
}

/** What is selected, for a pull request: verdict, table, and what makes the figures understood. */
function markdown() {
  const columns = titles.map((_, column) => column).filter((column) => column && !hidden.has(column));
  const plain = (text) => text.trim().replace(/\s+/g, " ").replace(/(\\*)\|/g, "$1$1\\|");
  const lines = [titles, ...selection.rows.map((i) => [...lineOf[i].cells].map((cell) => cell.textContent))].map((cells) => columns.map((column) => plain(cells[column])));
  const widths = columns.map((_, n) => Math.max(3, ...lines.map((cells) => cells[n].length)));
  const [head, ...rest] = lines.map((cells) => `| ${cells.map((cell, n) => cell.padEnd(widths[n])).join(" | ")} |`);
  const filter = byId("filter").value.trim(), some = selection.rows.length < rows.length;
  const verdict = some && DATA.verdict.length ? [`Of all ${rows.length} rows:`, ...DATA.verdict] : DATA.verdict;
  const blocks = [
    verdict, some ? [`The ${selection.rows.length} of them with \`${filter}\`:`] : [],
    [head, `|${widths.map((width) => "-".repeat(width + 2)).join("|")}|`, ...rest], DATA.below, DATA.notes.map((note) => `- ${note}`),
  ];
  return blocks.filter((block) => block.length).map((block) => block.join("\n")).join("\n\n") + "\n";
}

/** To the clipboard; where a browser has none for files, from a box with the text, which stays if that fails, too. */
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
