// The picture of the curves: scales, axes, lines.

const MARGIN = { top: 30, right: 14, bottom: 44, left: 58 };
const MANY = 8; // groups: beyond, bands only stand out when their group is pointed at

function scaleOf([low, high], [from, to], log) {
  const place = log ? Math.log10 : (v) => v;
  const span = place(high) - place(low);
  return {
    to: (v) => from + ((place(v) - place(low)) / span) * (to - from),
    back: (p) => { const v = place(low) + ((p - from) / (to - from)) * span; return log ? 10 ** v : v; },
  };
}

function extentOf(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
  return low <= high ? [low, high] : null;
}

function xDomain(view) {
  if (view.zoom?.x) return view.zoom.x;
  const extent = extentOf(visible(view).flatMap((line) => line.mean.map((p) => p.x)));
  if (!extent) return [0, 1];
  return extent[0] === extent[1] ? [extent[0] - 1, extent[1] + 1] : extent;
}

// Points inside, and their neighbours, whose segments reach in.
function within(points, [low, high]) {
  return points.filter((p, i) => (points[i + 1]?.x ?? p.x) >= low && (points[i - 1]?.x ?? p.x) <= high);
}

function yDomain(view, xs) {
  if (view.zoom?.y) return view.zoom.y;
  const shown = visible(view).flatMap((line) => [
    ...within(line.mean, xs).flatMap((p) => [p.y, p.low, p.high]),
    ...(view.runs ? line.runs.flatMap((run) => within(run, xs).map((p) => p.y)) : []),
  ]);
  if (view.series.target !== null && !view.zoom) shown.push(view.series.target);
  if (!view.zoom && !view.log) shown.push(...besideWithin(view, extentOf(shown) ?? [0, 1]));
  return view.log ? logDomain(shown) : linearDomain(shown);
}

function logDomain(values) {
  const [low, high] = extentOf(values.filter((v) => v > 0)) ?? [0.1, 1];
  return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
}

function linearDomain(values) {
  const [low, high] = extentOf(values.filter(Number.isFinite)) ?? [0, 1];
  if (low === high) return [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  const pad = (high - low) * 0.05;
  return [low >= 0 && low < pad ? 0 : low - pad, high + pad];
}

const visible = (view) => view.series.lines.filter((line) => !view.hidden.has(line.place));

function pathOf(points, view, key = "y") {
  const usable = points.filter((p) => !view.log || p[key] > 0);
  return usable.map((p, i) => `${i ? "L" : "M"}${view.x.to(p.x).toFixed(1)} ${view.y.to(p[key]).toFixed(1)}`).join("");
}

// On a log scale a band that reaches below zero ends at the bottom of the picture.
function bandOf(points, view) {
  if (!points.some((p) => p.std > 0)) return "";
  const floor = view.log ? view.yDomain[0] / 10 : -Infinity;
  const kept = points.filter((p) => !view.log || p.y > 0).map((p) => ({ ...p, low: Math.max(p.low, floor), high: Math.max(p.high, floor) }));
  const back = [...kept].reverse();
  return `${pathOf(kept, view, "high")}${pathOf(back, view, "low").replace("M", "L")}Z`;
}

function groupOf(line, view) {
  const node = shape("g", { class: `group ${styleOf(line.place)}`, "data-group": line.place });
  const band = bandOf(line.mean, view);
  if (band) node.append(shape("path", { class: "band", d: band }));
  if (view.runs) node.append(...line.runs.map((run) => shape("path", { class: "run", d: pathOf(run, view) })));
  node.append(shape("path", { class: "mean", d: pathOf(line.mean, view) }));
  if (line.mean.length === 1 && !(view.log && line.mean[0].y <= 0)) {
    node.append(shape("circle", { class: "alone", r: 4.5, cx: view.x.to(line.mean[0].x), cy: view.y.to(line.mean[0].y) }));
  }
  return node;
}

const styleOf = (place) => `c${place % DATA.colours} d${Math.floor(place / DATA.colours) % DATA.dashes}`;

function swatchOf(place) {
  return shape("svg", { class: `swatch ${styleOf(place)}`, viewBox: "0 0 30 10", "aria-hidden": "true" }, shape("line", { x1: 1, x2: 29, y1: 5, y2: 5 }));
}

function drawAxes(view) {
  const { width, height } = view, bottom = height - MARGIN.bottom, node = shape("g", { "aria-hidden": "true" });
  const yTicks = (view.log ? logTicks : linearTicks)(view.yDomain, Math.max(5, height / 62));
  for (const { value, text } of yTicks) {
    const y = view.y.to(value).toFixed(1);
    node.append(shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
    node.append(shape("text", { x: MARGIN.left - 9, y, dy: "0.35em", "text-anchor": "end" }, text));
  }
  for (const { value, text } of linearTicks(view.xDomain, Math.max(4, width / 95), view.axis === "round" ? 1 : 0)) {
    const x = view.x.to(value).toFixed(1);
    node.append(shape("line", { class: "base", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
    node.append(shape("text", { x, y: bottom + 18, "text-anchor": "middle" }, text));
  }
  node.append(shape("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }));
  const names = axisNames(view);
  node.append(shape("text", { class: "axis-name", id: "y-name", x: 2, y: 14 }, names.y));
  node.append(shape("text", { class: "axis-name", id: "x-name", x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 6, "text-anchor": "middle" }, names.x));
  return node;
}

const words = (metric) => metric.replaceAll("_", " ");

function axisNames(view) {
  const { xUnit, yUnit } = view.series;
  return {
    y: `${words(view.metric)}${yUnit ? ` (${yUnit})` : ""}${view.log ? ", log scale" : ""}${view.smooth ? ", smoothed" : ""}`,
    x: view.axis === "round" ? "round" : `${AXES[view.axis].name}, summed up to each round (${xUnit})`,
  };
}

function drawTarget(view) {
  const { target, yUnit } = view.series;
  if (target === null || (view.log && target <= 0)) return [];
  const y = view.y.to(target), right = view.width - MARGIN.right - MARGIN.left;
  if (y < MARGIN.top || y > view.height - MARGIN.bottom) return [];
  const text = `target ${Number(target.toPrecision(6))}${yUnit && ` ${yUnit}`}`;
  return [
    shape("line", { class: "target", x1: 0, x2: right, y1: y, y2: y }),
    shape("text", { class: "target-name", x: 5, y: y < MARGIN.top + 16 ? y + 15 : y - 6 }, text),
  ];
}

function describe(view) {
  const shown = visible(view).filter((line) => line.exact.length);
  const ends = shown.map((line) => `${line.label}: ${valueText(line.exact.at(-1).y, view.series.yUnit)} in round ${line.exact.at(-1).round}`);
  return `Last values. ${ends.join("; ")}.${describeBeside(view)}`;
}

function measure(view) {
  view.width = Math.max(280, view.box.clientWidth);
  view.height = clamp(view.width * 0.55, 300, 460);
  view.places = null;
  view.xDomain = xDomain(view);
  view.yDomain = yDomain(view, view.xDomain);
  view.x = scaleOf(view.xDomain, [MARGIN.left, view.width - MARGIN.right], false);
  view.y = scaleOf(view.yDomain, [view.height - MARGIN.bottom, MARGIN.top], view.log);
}

function draw(view) {
  measure(view);
  const { width, height } = view;
  const frame = { x: MARGIN.left, y: 0, width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.bottom };
  // A nested svg clips without an id.  Its inside is moved back, so that all share one coordinate system.
  const inside = shape("g", { transform: `translate(${-MARGIN.left} 0)` }, ...visible(view).map((line) => groupOf(line, view)));
  const marks = shape("g", { id: "marks", transform: `translate(${-MARGIN.left} 0)` });
  const plot = shape("svg", { ...frame, overflow: "hidden" }, inside, ...drawBeside(view), ...drawTarget(view), marks);
  const title = shape("title", { id: "chart-title" }, `${axisNames(view).y} over ${axisNames(view).x}`);
  const about = shape("desc", { id: "chart-about" }, describe(view));
  const svg = shape("svg", { class: "live", role: "img", viewBox: `0 0 ${width} ${height}`, "aria-labelledby": "chart-title", "aria-describedby": "chart-about" });
  svg.classList.toggle("many", visible(view).length > MANY);
  svg.append(title, about, drawAxes(view), plot);
  view.svg.replaceWith(svg);
  view.svg = svg;
  view.reset.hidden = !view.zoom;
}
