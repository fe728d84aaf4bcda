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

const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

// Figures have no colours of text and lines: the page sets them.
const themed = (layout) => {
  const [text, faint, grid, panel] = ["--text", "--faint", "--grid", "--panel"].map(colour);
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
  return { ...trace, marker: { ...trace.marker, line: { ...(trace.marker.line || {}), color: colour("--panel") } } };
};

const draw = async () => {
  for (const [name, figure] of Object.entries(figures)) {
    await Plotly.react(name, figure.data.map(outlined), themed(figure.layout), config);
  }
};

const showTheme = () => {
  const button = document.getElementById("theme");
  button.textContent = isDark() ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(isDark()));
  button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
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

const moves = {
  in: ([low, high]) => [low + (high - low) / 4, high - (high - low) / 4],
  out: ([low, high]) => [low - (high - low) / 2, high + (high - low) / 2],
  left: ([low, high]) => [low - (high - low) / 4, high - (high - low) / 4],
  right: ([low, high]) => [low + (high - low) / 4, high + (high - low) / 4],
};

for (const button of document.querySelectorAll("button[data-figure]")) {
  button.addEventListener("click", async () => {
    const { figure, do: action } = button.dataset;
    const whole = figures[figure].layout.xaxis.range;
    const now = document.getElementById(figure).layout.xaxis.range;
    await Plotly.relayout(figure, { "xaxis.range": action === "all" ? [...whole] : moves[action](now) });
  });
}

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
