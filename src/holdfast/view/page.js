"use strict";
(() => {
  let figures = JSON.parse(document.getElementById("figures").textContent);
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
      uirevision: place.getAttribute("aria-label"),
    };
  }

  function draw(place) {
    const figure = figures[place.dataset.figure];
    drawn.set(place, figure);
    place.style.height = "";
    if (figure.layout.showlegend) {
      const length = figure.data.reduce((sum, trace) => sum + 50 + 7 * trace.name.length, 0);
      place.style.height = `${place.clientHeight + 18 * Math.ceil(length / place.clientWidth)}px`;
    }
    Plotly.react(place, figure.data, layoutOf(figure, place), { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] });
  }

  const places = () => [...document.querySelectorAll(".chart")];
  const folded = (place) => { const details = place.closest("details"); return details !== null && !details.open; };
  const drawSeen = () => places().forEach((place) => { if (!drawn.has(place) && !folded(place)) draw(place); });
  document.addEventListener("toggle", drawSeen, true);

  // For a page that is live: its charts are in their places, and those that differ are drawn as they are now.
  window.drawAnew = (fresh) => {
    const before = figures;
    figures = fresh;
    for (const place of [...drawn.keys()]) {
      const key = place.dataset.figure;
      if (!place.isConnected) {
        Plotly.purge(place);
        drawn.delete(place);
      } else if (JSON.stringify(fresh[key]) !== JSON.stringify(before[key])) draw(place);
    }
    drawSeen();
  };
  // The tables of answers: a click on a heading sorts, the other way round the second time; words leave rows out.
  document.addEventListener("click", (event) => {
    const head = event.target.closest(".answers th");
    if (head === null) return;
    const body = head.closest("table").tBodies[0], falls = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const text = (row) => row.cells[head.cellIndex].textContent;
    const compare = new Intl.Collator(undefined, { numeric: true }).compare;
    const order = (one, other) => {
      const [a, b] = [Number(text(one)), Number(text(other))];
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) && Number.isNaN(b) ? compare(text(one), text(other)) : Number.isNaN(a) - Number.isNaN(b);
      return a - b;
    };
    body.append(...[...body.rows].sort((one, other) => falls ? order(other, one) : order(one, other)));
  });
  document.addEventListener("input", (event) => {
    if (!event.target.matches(".search")) return;
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean), place = event.target.closest("p");
    let found = 0;
    for (const row of place.nextElementSibling.querySelectorAll("tbody tr")) {
      const content = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => content.includes(word));
      found += !row.hidden;
    }
    place.querySelector(".found").textContent = words.length ? `${found} found` : "";
  });
  dark.addEventListener("change", () => drawn.forEach((figure, place) => Plotly.relayout(place, layoutOf(figure, place))));
  drawSeen();
  document.documentElement.dataset.charts = String(drawn.size);
})();
