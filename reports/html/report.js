// Draws the charts in the page's colours, again when those change, and fewer details on a narrow page.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 48rem)");
  const chosen = document.getElementById("rank");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function layoutOf(figure) {
    const layout = structuredClone(figure.layout);
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { ...layout.font, color: colour("--ink"), family: "inherit", size: narrow.matches ? 11 : 13 };
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line") });
    }
    layout.hoverlabel = {
      ...layout.hoverlabel, bgcolor: colour("--panel"), bordercolor: colour("--soft"),
      font: { color: colour("--ink"), size: narrow.matches ? 10 : 12 },
    };
    for (const annotation of layout.annotations ?? []) {
      annotation.arrowcolor = colour("--ink");
      if (annotation.name === "peak") {
        annotation.hoverlabel = { ...layout.hoverlabel };
        Object.assign(annotation, { bgcolor: colour("--paper"), bordercolor: colour("--ink") });
        annotation.font.color = colour("--ink");
      }
      if (annotation.name === "phase" && narrow.matches) annotation.visible = false;
    }
    layout.legend = { ...layout.legend, font: { size: narrow.matches ? 10 : 12 } };
    if (narrow.matches) Object.assign(layout.margin, { l: 46, r: 6 });
    return layout;
  }

  function draw(id, name) {
    const figure = charts[name];
    const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
    Plotly.react(id, structuredClone(figure.data), layoutOf(figure), config);
  }

  function drawAll() {
    draw("timeline", chosen ? chosen.value : "timeline-0");
    draw("waterfall", "waterfall");
  }

  drawAll();
  for (const query of [dark, narrow]) query.addEventListener("change", drawAll);
  chosen?.addEventListener("change", drawAll);
})();
