// Reading off values: crosshair and tooltip, by pointer and by arrow keys.

// Where the crosshair may stand: found once per picture, asked with every move.
function snapPlaces(view) {
  if (view.places) return view.places;
  const [low, high] = view.xDomain;
  const all = new Set(visible(view).flatMap((line) => line.exact.map((p) => p.x)));
  return (view.places = [...all].filter((x) => x >= low && x <= high).sort((a, b) => a - b));
}

function nearest(values, wanted, of = (v) => v) {
  let best = null;
  for (const value of values) {
    if (best === null || Math.abs(of(value) - wanted) < Math.abs(of(best) - wanted)) best = value;
  }
  return best;
}

// The value of every shown group closest to x, largest first as the lines stand.
function readings(view, x) {
  const shown = visible(view).filter((line) => line.exact.length);
  const found = shown.map((line) => {
    const exact = nearest(line.exact, x, (p) => p.x);
    return { line, exact, drawn: line.mean[line.exact.indexOf(exact)] };
  });
  return found.sort((a, b) => b.exact.y - a.exact.y);
}

function readAt(view, x, pointerY = null) {
  view.at = x;
  const rows = readings(view, x);
  if (!rows.length) return stopReading(view);
  const heights = rows.map((row) => ({ row, y: view.y.to(row.drawn.y) }));
  const close = pointerY === null ? null : nearest(heights, pointerY, (h) => h.y);
  const near = close && Math.abs(close.y - pointerY) < 14 ? close.row : null;
  drawMarks(view, x, rows);
  fillTip(view, x, rows, near);
  placeTip(view, view.x.to(x));
}

function drawMarks(view, x, rows) {
  const marks = byId("marks"), place = view.x.to(x);
  marks.replaceChildren(shape("line", { class: "crosshair", x1: place, x2: place, y1: MARGIN.top, y2: view.height - MARGIN.bottom }));
  for (const { line, drawn } of rows) {
    if (view.log && drawn.y <= 0) continue;
    marks.append(shape("circle", { class: `dot ${styleOf(line.place)}`, r: 4, cx: view.x.to(drawn.x), cy: view.y.to(drawn.y) }));
  }
}

function fillTip(view, x, rows, near) {
  const { xUnit, yUnit } = view.series, byRound = view.axis === "round";
  const table = element("table", { role: "presentation" });
  for (const { line, exact } of rows) {
    const spread = exact.count > 1 ? `± ${spreadText(exact.std, exact.y, yUnit)}` : "";
    const ended = x > exact.x && exact === line.exact.at(-1) ? "last, " : "";
    const elsewhere = byRound && exact.x === x ? "" : `${ended}round ${exact.round}`;
    const row = element("tr", { "data-group": line.place },
      element("td", {}, swatchOf(line.place)), element("td", {}, line.label), element("td", {}, valueText(exact.y, yUnit)),
      element("td", {}, spread), element("td", { class: "more" }, elsewhere));
    row.classList.toggle("near", near?.line === line);
    table.append(row);
  }
  view.tip.replaceChildren(element("strong", {}, byRound ? `round ${x}` : valueText(x, xUnit)), table);
  view.tip.hidden = false;
}

function placeTip(view, place) {
  const ratio = view.box.clientWidth / view.width, left = place * ratio, size = view.tip.offsetWidth;
  const right = left + 16 + size <= view.box.clientWidth;
  view.tip.style.left = `${right ? left + 16 : Math.max(0, left - 16 - size)}px`;
  view.tip.style.top = `${MARGIN.top}px`;
}

function stopReading(view) {
  view.at = null;
  view.tip.hidden = true;
  byId("marks")?.replaceChildren();
}

// Where a pointer is, in the picture's own coordinates.
function spotOf(view, event) {
  const frame = view.svg.getBoundingClientRect(), ratio = view.width / frame.width;
  return {
    x: clamp((event.clientX - frame.left) * ratio, MARGIN.left, view.width - MARGIN.right),
    y: clamp((event.clientY - frame.top) * ratio, MARGIN.top, view.height - MARGIN.bottom),
  };
}

function readPointer(view, event) {
  const spot = spotOf(view, event), x = nearest(snapPlaces(view), view.x.back(spot.x));
  if (x !== null) readAt(view, x, spot.y);
}

function readByKey(view, event) {
  const places = snapPlaces(view);
  if (event.key === "Escape") return stopReading(view);
  if (!places.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return undefined;
  event.preventDefault();
  const here = view.at === null ? -1 : places.indexOf(nearest(places, view.at));
  const last = places.length - 1;
  const next = { ArrowLeft: here < 0 ? last : Math.max(0, here - 1), ArrowRight: Math.min(last, here + 1), Home: 0, End: last }[event.key];
  return readAt(view, places[next]);
}
