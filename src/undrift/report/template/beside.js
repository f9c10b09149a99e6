// Baselines: thin lines across the picture, named at its right edge.

const NAME_HEIGHT = 15;

const besideOf = (view) => (view.beside ? DATA.baselines.flatMap((line, place) => {
  const value = line.values[view.metric];
  return value === undefined ? [] : [{ place, label: line.label, y: value / (view.series.yUnit === "%" ? 0.01 : 1) }];
}) : []);

// Those that lie so far away that curves would be flat are left to the table.
function besideWithin(view, [low, high]) {
  const room = 2 * (high - low);
  return besideOf(view).map((line) => line.y).filter((y) => y >= low - room && y <= high + room);
}

// Names that would cover each other move apart, in their order.
function besideNames(lines, view) {
  const top = MARGIN.top + 10, bottom = view.height - MARGIN.bottom - 4;
  const names = lines.map((line) => ({ ...line, at: view.y.to(line.y) - 4 })).sort((a, b) => a.at - b.at);
  names.forEach((name, i) => { name.at = Math.max(name.at, i ? names[i - 1].at + NAME_HEIGHT : top); });
  for (let i = names.length - 1; i >= 0; i--) names[i].at = Math.min(names[i].at, i < names.length - 1 ? names[i + 1].at - NAME_HEIGHT : bottom);
  return names;
}

function drawBeside(view) {
  const right = view.width - MARGIN.right - MARGIN.left, [low, high] = view.yDomain;
  const lines = besideOf(view).filter(({ y }) => y >= low && y <= high && !(view.log && y <= 0));
  const places = lines.map(({ place, y }) => shape("line", { class: `beside b${place % 4}`, x1: 0, x2: right, y1: view.y.to(y), y2: view.y.to(y) }));
  const names = besideNames(lines, view).map(({ label, at, y }) =>
    shape("text", { class: "beside-name", x: right - 4, y: at, "text-anchor": "end" }, `${label} ${valueText(y, view.series.yUnit)}`));
  return [...places, ...names];
}

function describeBeside(view) {
  const told = besideOf(view).map(({ label, y }) => `${label}: ${valueText(y, view.series.yUnit)}`);
  return told.length ? ` Baselines. ${told.join("; ")}.` : "";
}
