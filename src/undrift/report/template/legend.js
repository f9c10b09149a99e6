// Names of the groups: hide, show, show alone, point at.

const legendButtons = () => [...byId("legend").querySelectorAll("button")];

function markLegend(view) {
  for (const button of legendButtons()) {
    const place = Number(button.dataset.group), line = view.series.lines[place];
    button.setAttribute("aria-pressed", String(!view.hidden.has(place)));
    button.querySelector("span").classList.toggle("none", line.exact.length === 0);
  }
}

function setHidden(view, hidden) {
  view.hidden = new Set(hidden);
  stopReading(view);
  markLegend(view);
  draw(view);
}

function toggle(view, place) {
  const hidden = new Set(view.hidden);
  if (!hidden.delete(place)) hidden.add(place);
  setHidden(view, hidden);
  pointAt(view, hidden.has(place) ? null : place);
}

function showAlone(view, place) {
  setHidden(view, view.series.lines.map((line) => line.place).filter((other) => other !== place));
}

function pointAt(view, place) {
  const group = place === null ? null : view.svg.querySelector(`g.group[data-group="${place}"]`);
  view.svg.querySelectorAll("g.lit").forEach((node) => node.classList.remove("lit"));
  view.svg.classList.toggle("dimmed", group !== null);
  if (group === null) return;
  group.classList.add("lit");
  group.parentNode.append(group); // later siblings are drawn on top
}

function listenToLegend(view) {
  for (const button of legendButtons()) {
    const place = Number(button.dataset.group);
    button.addEventListener("click", () => toggle(view, place));
    button.addEventListener("dblclick", () => showAlone(view, place));
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => pointAt(view, place));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => pointAt(view, null));
  }
  byId("show-all").addEventListener("click", () => setHidden(view, []));
  byId("hide-all").addEventListener("click", () => setHidden(view, view.series.lines.map((line) => line.place)));
  byId("legend-tools").hidden = view.series.lines.length < 4;
}
