// Show the difference of two runs, and start the page.

/** Show the settings that differ between the two chosen runs, and the ledgers of their rows. */
function drawDifference() {
  if (!caption("difference", "", DATA.runs.length > 1)) return;
  const repeat = (n) => n ? `, run ${n + 1}` : "";
  const options = rows.flatMap((row, i) => row.runs.map((run, n) => [`${run}`, `${i + 1}: ${row.name}${repeat(n)}`]));
  const first = [rows[0].runs[0], rows[1]?.runs[0] ?? 1], name = new Map(options);
  const pair = ["Configuration of", "against"].map((label, n) => choice("difference", label, options, `${first[n]}`));
  const shown = (run, n) => DATA.texts[DATA.runs[run][n]] ?? "-";
  const all = DATA.settings.map((key, n) => [key, ...pair.map((run) => shown(run, n))]);
  const differing = all.filter(([, one, other]) => one !== other), box = byId("difference").lastElementChild;
  box.replaceChildren();
  const names = pair.map((run) => name.get(run)), owners = pair.map((run) => rows.find((row) => row.runs.includes(Number(run))));
  if (differing.length) listed(box, ["key", ...names], differing);
  else add(box, "p", {}, "nothing differs");
  for (const title of [SECONDS, GIB]) {
    const [one, other] = owners.map((row) => row.ledgers[title]);
    if (!one || !other || one === other) continue;
    const lines = distinct([...Object.keys(one), ...Object.keys(other)]).map((line) => [line, one[line] ?? 0, other[line] ?? 0]);
    lines.sort((a, b) => Math.abs(b[2] - b[1]) - Math.abs(a[2] - a[1]));
    const cells = lines.map(([line, ...values]) => [line, ...[...values, values[1] - values[0]].map((each) => each.toFixed(4))]);
    listed(box, [title, ...names, "difference"], cells);
  }
}

/** Add a table. head: its first line; lines: the others. */
function listed(box, head, lines) {
  const table = add(box, "table");
  for (const cells of [head, ...lines]) {
    const line = add(table, "tr");
    for (const cell of cells) add(line, cells === head ? "th" : "td", {}, cell);
  }
}

const DRAWN = [
  drawTable, drawDots, drawScatter, drawHeat, drawScaling, drawParallel, drawTrained, drawHeldOut, drawTimes, drawRanks, drawSteps, drawDifference,
];

function redraw() {
  byId("main").classList.toggle("picking", selection.rows.some((i) => selection.picked.has(i)));
  for (const draw of DRAWN) draw();
}

/** Return the filter that the page's address contains, so that a reload or a link keeps the filter. */
function filterOfAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1)).replace(/^row-\d+$/, "");
  } catch {
    return "";  // the address was truncated within a character
  }
}

/** Show how long ago the page was written. */
function showAge() {
  const minutes = Math.floor((Date.now() - Date.parse(byId("written").dateTime)) / 60000), hours = Math.floor(minutes / 60);
  const age = minutes < 120 ? `${minutes} min` : hours < 48 ? `${hours} hours` : `${Math.floor(hours / 24)} days`;
  byId("age").textContent = minutes > 0 ? ` (${age} ago)` : "";
}

prepareTable();
byId("charts").classList.toggle("few", rows.length <= FEW);
byId("charts").hidden = document.querySelector(".controls").hidden = false;
byId("filter").placeholder = `${keys.length ? `${keys[0]}=${rows[0].values[keys[0]] ?? ""} ` : ""}wps>1000`;
byId("filter").value = filterOfAddress();
byId("filter").addEventListener("input", select);
byId("copy").addEventListener("click", copy);
byId("charts").addEventListener("click", (event) => {
  const clicked = event.target.closest("[data-row]");
  if (clicked) pick(Number(clicked.dataset.row));
});
select();
foldColumns();
showAge();
setInterval(showAge, 30000);
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (lastWidth === innerWidth) return;  // only the height changes when a phone hides or shows its bars
  lastWidth = innerWidth;
  redraw();
  foldColumns();
});
addEventListener("beforeprint", () => {
  paper = byId("reasons").open = true;
  redraw();
});
addEventListener("afterprint", () => {
  paper = false;
  redraw();
});
