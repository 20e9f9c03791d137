"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  // What the page decides: colours of its theme, margins, and how much room a legend may take.
  function layoutOf(figure, place) {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat: "power", title: { standoff: 6 } };
    const merged = (one) => ({ ...axis, ...one, title: { ...axis.title, ...(one.title || {}) } });
    const layout = figure.layout;
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: 12 },
      margin: { l: 12, r: 12, t: 18, b: 8 },
      xaxis: merged(layout.xaxis),
      yaxis: merged(layout.yaxis),
      legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } },
      hoverlabel: { namelength: -1 },
      hovermode: place.classList.contains("lanes") ? "closest" : "x",
      dragmode: "zoom",
    };
  }

  function draw(place) {
    if (drawn.has(place)) return;
    const figure = figures[place.dataset.figure];
    drawn.set(place, figure);
    if (figure.layout.showlegend) {
      const length = figure.data.reduce((sum, trace) => sum + 50 + 7 * trace.name.length, 0);
      place.style.height = `${place.clientHeight + 18 * Math.ceil(length / place.clientWidth)}px`;
    }
    Plotly.newPlot(place, figure.data, layoutOf(figure, place), { responsive: true, displaylogo: false, displayModeBar: false });
  }

  const places = [...document.querySelectorAll(".chart")];
  const folded = (place) => { const details = place.closest("details"); return details !== null && !details.open; };
  const drawSeen = () => places.forEach((place) => { if (!folded(place)) draw(place); });
  document.querySelectorAll("details").forEach((one) => one.addEventListener("toggle", drawSeen));
  dark.addEventListener("change", () => drawn.forEach((figure, place) => Plotly.relayout(place, layoutOf(figure, place))));
  drawSeen();
  document.documentElement.dataset.charts = String(drawn.size);
})();
