"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const config = {
  displaylogo: false,
  responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d"],
  // Pages never upload anything: there is no "Share chart" button, and no server to which charts could be sent.
  showSendToCloud: false,
  plotlyServerURL: "",
};

const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

// Figures have no colors of text and lines: the page sets them.
const themed = (layout) => {
  const [text, faint, grid, panel] = ["--text", "--faint", "--grid", "--panel"].map(color);
  const axis = { gridcolor: grid, linecolor: faint, zerolinecolor: grid, tickcolor: faint };
  return {
    ...layout,
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
    shapes: (layout.shapes || []).map((shape) => ({ ...shape, line: { ...shape.line, color: faint } })),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, family: getComputedStyle(document.body).fontFamily, size: 12.5 },
    hoverlabel: { bgcolor: panel, bordercolor: faint, font: { color: text }, align: "left" },
    modebar: { color: faint, activecolor: text, bgcolor: "rgba(0,0,0,0)" },
  };
};

const outlined = (trace) => {
  if (trace.type !== "scatter" || !trace.mode.includes("markers")) return trace;
  return { ...trace, marker: { ...trace.marker, line: { ...(trace.marker.line || {}), color: color("--panel") } } };
};

const draw = async () => {
  for (const [name, figure] of Object.entries(figures)) {
    await Plotly.react(name, figure.data.map(outlined), themed(figure.layout), config);
    await new Promise((resume) => { setTimeout(resume); }); // the browser shows this one before the next
  }
};

const showTheme = () => {
  const button = document.getElementById("theme");
  button.textContent = isDark() ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(isDark()));
  button.setAttribute("aria-label", isDark() ? "Use light colors" : "Use dark colors");
};

document.getElementById("theme").addEventListener("click", async () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
  await draw();
});

dark.addEventListener("change", async () => {
  showTheme();
  await draw();
});

// `at`: where on the visible part of the axis, 0 to 1, what a zoom leaves in place.
const moves = {
  in: ([low, high], at) => [low + ((high - low) / 2) * at, high - ((high - low) / 2) * (1 - at)],
  out: ([low, high], at) => [low - (high - low) * at, high + (high - low) * (1 - at)],
  left: ([low, high]) => [low - (high - low) / 4, high - (high - low) / 4],
  right: ([low, high]) => [low + (high - low) / 4, high + (high - low) / 4],
};

const move = async (name, action, at = 0.5) => {
  const whole = figures[name].layout.xaxis.range;
  const now = document.getElementById(name).layout.xaxis.range;
  await Plotly.relayout(name, { "xaxis.range": action === "all" ? [...whole] : moves[action](now, at) });
};

for (const button of document.querySelectorAll("button[data-figure]")) {
  button.addEventListener("click", () => move(button.dataset.figure, button.dataset.do));
}

// The keys of Perfetto: w and s zoom, a and d move, around the pointer of the chart that it is on; else of the chart
// that is seen best.
const keys = { w: "in", s: "out", a: "left", d: "right", 0: "all" };
const zoomed = [...new Set([...document.querySelectorAll("button[data-figure]")].map((each) => each.dataset.figure))];
let pointer = null;

for (const name of zoomed) {
  const chart = document.getElementById(name);
  chart.addEventListener("pointermove", (event) => { pointer = { name, x: event.clientX }; });
  chart.addEventListener("pointerleave", () => { pointer = null; });
}

const seen = (name) => {
  const { top, bottom } = document.getElementById(name).getBoundingClientRect();
  return Math.min(bottom, window.innerHeight) - Math.max(top, 0);
};

const placeOf = ({ name, x }) => {
  const chart = document.getElementById(name);
  const axis = chart._fullLayout.xaxis;
  const left = chart.getBoundingClientRect().left + axis._offset;
  return Math.min(1, Math.max(0, (x - left) / axis._length));
};

document.addEventListener("keydown", async (event) => {
  const action = keys[event.key.toLowerCase()];
  const isTyping = event.target.closest && event.target.closest("input, select, textarea");
  if (!action || isTyping || event.ctrlKey || event.metaKey || event.altKey || !zoomed.length) return;
  const best = zoomed.reduce((a, b) => (seen(b) > seen(a) ? b : a));
  const name = pointer ? pointer.name : best;
  if (seen(name) <= 0) return;
  event.preventDefault();
  await move(name, action, pointer ? placeOf(pointer) : 0.5);
});

for (const select of document.querySelectorAll("select[data-figure]")) {
  select.addEventListener("change", async () => {
    const figure = figures[select.dataset.figure];
    const visible = new Set(select.value.split(",").map(Number));
    figure.data.forEach((trace, index) => { trace.visible = visible.has(index); });
    await Plotly.react(select.dataset.figure, figure.data.map(outlined), themed(figure.layout), config);
  });
}

showTheme();
draw().then(() => { root.dataset.drawn = "true"; });
