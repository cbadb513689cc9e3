"use strict";
const { rows, baseline, titles } = JSON.parse(document.getElementById("data").textContent);
// Okabe and Ito's colours, which the colour-blind can tell apart; dashes and symbols repeat what they say.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star"];
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
const at = (list, i) => list[i % list.length];

function layout(extra) {
  const style = getComputedStyle(document.documentElement);
  const line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 10, r: 15, t: 10, b: 40 },
    font: { color: style.getPropertyValue("--text").trim(), size: 12 }, legend: { orientation: "h", y: -0.2, yanchor: "top" },
    hoverlabel: { namelength: -1 }, ...extra,
  };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) if (extra[name] || name !== "yaxis2") merged[name] = { ...axis, ...extra[name] };
  return merged;
}

function bars(id, traces, kept, extra = {}) {
  const box = document.getElementById(id);
  if (!kept.length) { box.closest("figure").hidden = true; return; }
  const broken = rows.map((row) => row.name.length > 22 ? row.name.replaceAll(" · ", "<br>") : row.name);
  const lines = Math.max(...kept.map((i) => broken[i].split("<br>").length));
  Plotly.react(box, traces, layout({
    height: 90 + kept.length * Math.max(16 * lines + 8, 15 * traces.length + 8), barmode: "group", bargap: 0.25,
    yaxis: { tickvals: kept, ticktext: kept.map((i) => broken[i]), autorange: "reversed", showgrid: false, zeroline: false },
    ...extra,
  }), CONFIG);
}

function bar(name, kept, values, colour, extra = {}) {
  return { type: "bar", orientation: "h", name, y: kept, x: kept.map(values), marker: { color: colour, ...extra.marker },
    hovertext: kept.map((i) => rows[i].name), hovertemplate: "%{hovertext}<br>%{x:,.5~g}<extra>" + name + "</extra>", ...extra };
}

const where = (known) => rows.map((_, i) => i).filter((i) => known(rows[i]) !== null);

function speed() {
  const kept = where((row) => row.wps[0]);
  const spread = { type: "data", symmetric: false, array: kept.map((i) => (rows[i].wps[2] ?? rows[i].wps[0]) - rows[i].wps[0]),
    arrayminus: kept.map((i) => rows[i].wps[0] - (rows[i].wps[1] ?? rows[i].wps[0])), color: "#8C8C8C", thickness: 1.5 };
  bars("wps", [bar(titles.wps, kept, (i) => rows[i].wps[0], COLOURS[0], { error_x: spread })], kept, { xaxis: { rangemode: "tozero" } });
  const known = where((row) => row.mfu);
  bars("mfu", [bar(titles.mfu, known, (i) => rows[i].mfu, COLOURS[2])], known, { xaxis: { ticksuffix: "%", rangemode: "tozero" } });
}

function memory() {
  const device = rows.some((row) => row.active !== null);
  const kept = where((row) => device ? row.active : row.rss);
  const traces = device
    ? [bar(titles.active, kept, (i) => rows[i].active, COLOURS[0]),
       bar(titles.reserved, kept, (i) => rows[i].reserved, COLOURS[1], { marker: { pattern: { shape: "/" } } })]
    : [bar(titles.rss, kept, (i) => rows[i].rss, COLOURS[0])];
  const limits = device ? [...new Set(kept.map((i) => rows[i].limit).filter((limit) => limit !== null))] : [];
  bars("memory", traces, kept, {
    showlegend: true, xaxis: { ticksuffix: " GiB", rangemode: "tozero" },
    shapes: limits.map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: COLOURS[5], width: 2, dash: "dash" } })),
    annotations: limits.map((x) => ({ x, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: `the device has ${x.toFixed(0)} GiB` })),
    margin: { l: 10, r: 15, t: 30, b: 40 },
  });
}

function pareto() {
  const used = (row) => row.reserved ?? row.active ?? row.rss;
  const kept = where((row) => row.completed && row.wps[0] !== null ? used(row) : null);
  const box = document.getElementById("pareto");
  if (!kept.length) { box.closest("figure").hidden = true; return; }
  const front = kept.filter((i) => !kept.some((j) => used(rows[j]) <= used(rows[i]) && rows[j].wps[0] >= rows[i].wps[0]
    && (used(rows[j]) < used(rows[i]) || rows[j].wps[0] > rows[i].wps[0]))).sort((i, j) => used(rows[i]) - used(rows[j]));
  const points = kept.map((i) => ({ type: "scatter", mode: "markers", name: rows[i].name, x: [used(rows[i])], y: [rows[i].wps[0]],
    marker: { color: at(COLOURS, i), symbol: at(SYMBOLS, i + Math.floor(i / COLOURS.length)), size: 11 }, hovertemplate: "%{x:.2f} GiB, %{y:,.0f} WPS<extra>%{fullData.name}</extra>" }));
  const line = { type: "scatter", mode: "lines", name: "Pareto front", x: front.map((i) => used(rows[i])), y: front.map((i) => rows[i].wps[0]),
    line: { color: "#8C8C8C", dash: "dot" }, hoverinfo: "skip" };
  Plotly.react(box, [line, ...points], layout({ height: 380 + 10 * Math.min(kept.length, 30), showlegend: kept.length <= 30,
    xaxis: { title: { text: "peak memory, GiB" } }, yaxis: { title: { text: titles.wps } } }), CONFIG);
}

function losses() {
  const kept = where((row) => row.steps.length ? 1 : null);
  const box = document.getElementById("losses");
  if (!kept.length) { box.closest("figure").hidden = true; return; }
  const line = (i) => ({ color: at(COLOURS, i), dash: at(DASHES, Math.floor(i / COLOURS.length) + i), width: 1.8 });
  const curve = (i, y, extra) => ({ type: "scatter", mode: rows[i].steps.length > 1 ? "lines" : "markers", name: rows[i].name,
    legendgroup: `${i}`, x: rows[i].steps, y, line: line(i), ...extra });
  const traces = kept.map((i) => curve(i, rows[i].losses, { hovertemplate: "step %{x}: %{y:.5f}<extra>%{fullData.name}</extra>" }));
  const compared = kept.filter((i) => rows[i].baseline !== null && rows[rows[i].baseline].steps.length);
  for (const i of compared) {
    const base = rows[rows[i].baseline], known = new Map(base.steps.map((step, k) => [step, base.losses[k]]));
    const apart = rows[i].steps.map((step, k) => known.has(step) ? (rows[i].losses[k] - known.get(step)) / known.get(step) : null);
    traces.push(curve(i, apart, { yaxis: "y2", showlegend: false, hovertemplate: "step %{x}: %{y:.2e}<extra>%{fullData.name}</extra>" }));
  }
  if (compared.length) document.getElementById("difference").textContent = `, and below it the relative difference from ${baseline}`;
  Plotly.react(box, traces, layout({
    height: (compared.length ? 620 : 420) + 8 * Math.min(kept.length, 40), showlegend: true, hovermode: "closest",
    legend: { orientation: "h", y: -0.12, yanchor: "top" }, xaxis: { title: { text: "step" }, anchor: compared.length ? "y2" : "y" },
    yaxis: { title: { text: "loss" }, domain: compared.length ? [0.4, 1] : [0, 1] },
    ...(compared.length ? { yaxis2: { title: { text: "difference" }, domain: [0, 0.32], exponentformat: "e" } } : {}),
  }), CONFIG);
}

function draw() { speed(); memory(); pareto(); losses(); }

function sortable(table) {
  const heads = [...table.querySelectorAll("th")];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((each) => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const by = (row) => row.cells[column].dataset.by;
    const compare = (a, b) => a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
    const body = table.tBodies[0];  // what is unknown stays last
    body.append(...[...body.rows].sort((a, b) => (by(a) === "") - (by(b) === "") || (down ? -1 : 1) * compare(by(a), by(b))));
  }));
}

function filterable(table, input, output) {
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
    output.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  };
  input.addEventListener("input", apply);
}

const table = document.getElementById("table");
sortable(table);
filterable(table, document.getElementById("filter"), document.getElementById("shown"));
document.getElementById("charts").hidden = false;
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
