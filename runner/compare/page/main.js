// The difference of two configurations, and everything put together.

/** The settings in which two runs differ. */
function drawDifference() {
  if (!caption("difference", "", runs.length > 1)) return;
  const options = rows.flatMap((row, i) => row.runs.map((run, n) => [`${run}`, `${i + 1}: ${row.name}${n ? `, run ${n + 1}` : ""}`]));
  const name = new Map(options), first = [rows[0].runs[0], rows[1]?.runs[0] ?? 1];
  const [a, b] = ["Configuration of", "against"].map((label, n) => choice("difference", label, options, `${first[n]}`));
  const box = byId("difference").lastElementChild;
  const shown = (run, n) => DATA.texts[runs[run][n]] ?? "-";
  const names = DATA.settings.map((key, n) => [key, shown(a, n), shown(b, n)]).filter(([, one, other]) => one !== other);
  box.replaceChildren();
  if (!names.length) return void add(box, "p", {}, "nothing differs");
  const lines = add(box, "table");
  for (const [n, cells] of [["key", name.get(a), name.get(b)], ...names].entries()) {
    const line = add(lines, "tr");
    for (const cell of cells) add(line, n ? "td" : "th", {}, cell);
  }
}

const DRAWN = [drawTable, drawDots, drawScatter, drawHeat, drawScaling, drawParallel, drawLosses, drawTimes, drawRanks, drawDifference];

function redraw() {
  byId("main").classList.toggle("picking", selection.rows.some((i) => selection.picked.has(i)));
  for (const draw of DRAWN) draw();
}

/** The filter that the address holds, so that a reload or a link to the page keeps it. */
function filterOfAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1)).replace(/^row-\d+$/, "");
  } catch {
    return "";  // it was cut
  }
}

/** How long ago the page was written. */
function age() {
  const minutes = Math.floor((Date.now() - Date.parse(byId("written").dateTime)) / 60000), hours = Math.floor(minutes / 60);
  byId("age").textContent = minutes < 1 ? "" : minutes < 120 ? ` (${minutes} min ago)` : hours < 48 ? ` (${hours} hours ago)` : ` (${Math.floor(hours / 24)} days ago)`;
}

prepareTable();
byId("charts").hidden = false;
document.querySelector(".controls").hidden = false;
byId("filter").placeholder = [...keys.slice(0, 1).map((key) => `${key}=${rows[0].values[key] ?? ""}`), "wps>1000"].join(" ");
byId("filter").value = filterOfAddress();
byId("filter").addEventListener("input", select);
byId("copy").addEventListener("click", copy);
byId("main").addEventListener("click", (event) => {
  const mark = event.target.closest("#charts [data-row]");
  if (mark) pick(Number(mark.dataset.row));
});
select();
styleColumns();
age();
setInterval(age, 30000);
let width = innerWidth;
addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; redraw(); styleColumns(); } });  // not for a phone's bars
addEventListener("beforeprint", () => { paper = true; byId("reasons").open = true; redraw(); });
addEventListener("afterprint", () => { paper = false; redraw(); });
