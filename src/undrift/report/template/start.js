// Puts everything in motion.

const DATA = JSON.parse(byId("data").textContent);

// Called now, and whenever the width changes: a change of height is our own doing.
function whenResized(box, act) {
  let width = null;
  new ResizeObserver(() => {
    if (box.clientWidth === width || box.clientWidth === 0) return;
    width = box.clientWidth;
    act();
  }).observe(box);
  width = box.clientWidth;
  act();
}

function fillSelect(id, choices) {
  byId(id).replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
}

function listenToControls(view) {
  const again = () => { stopReading(view); view.series = seriesOf(DATA, view); limitLog(view); markLegend(view); draw(view); };
  onChange("metric", (select) => { view.metric = select.value; view.zoom = view.zoom?.x ? { x: view.zoom.x, y: null } : null; again(); });
  onChange("axis", (select) => { view.axis = select.value; view.zoom = null; again(); });
  onChange("log", (box) => { view.log = box.checked; if (view.zoom) view.zoom.y = null; again(); });
  onChange("runs", (box) => { view.runs = box.checked; again(); });
  onChange("beside", (box) => { view.beside = box.checked; draw(view); });
  onChange("smooth", (slider) => {
    view.smooth = Number(slider.value);
    byId("smooth-value").textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    again();
  });
}

// A log scale needs something above zero.
function limitLog(view) {
  const possible = view.series.lines.some((line) => line.exact.some((p) => p.y > 0));
  byId("log").disabled = !possible;
  if (!possible) view.log = byId("log").checked = false;
}

function startCurves() {
  if (!DATA.metrics.length) return;
  const box = byId("plot"), still = box.querySelector("svg");
  const tip = element("div", { class: "tip", id: "tip", "aria-live": "polite", hidden: "" });
  const reset = element("button", { type: "button", class: "quiet reset", id: "reset", hidden: "" }, "Reset zoom");
  const view = { box, svg: still, tip, reset, metric: DATA.metrics[0], axis: "round", log: false, runs: false, smooth: 0, hidden: new Set(), beside: true, zoom: null, at: null, drag: null };
  view.series = seriesOf(DATA, view);
  fillSelect("metric", DATA.metrics.map((metric) => [metric, words(metric)]));
  fillSelect("axis", usableAxes(DATA.groups).map((key) => [key, AXES[key].name]));
  for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Curves. Arrow keys read off values."]]) box.setAttribute(name, value);
  box.append(reset, tip);
  limitLog(view);
  markLegend(view);
  listenToControls(view);
  listenToLegend(view);
  listenToPointer(view);
  byId("beside").parentNode.hidden = !DATA.baselines.length;
  byId("controls").hidden = byId("how").hidden = false;
  whenResized(box, () => { draw(view); if (view.at !== null) readAt(view, view.at); });
}

async function copyText(source) {
  try {
    await navigator.clipboard.writeText(source.textContent);
  } catch {
    // Pages opened from a disk may not use the clipboard directly.
    getSelection().selectAllChildren(source);
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
}

function startCopying() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await copyText(byId(button.dataset.copy));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
}

startTable();
startCurves();
startJudged();
startPartition();
startCopying();
