// From runs to lines: averages over seeds, and the amounts an axis may count.

const AXES = {
  round: { name: "round", parts: null, units: [[1, ""]] },
  bytes: { name: "bytes sent and received", parts: ["bytes_up", "bytes_down"], units: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]] },
  seconds: { name: "time", parts: ["seconds"], units: [[7200, "h", 3600], [120, "min", 60], [0, "s", 1]] },
};

const hasValues = (run, metric) => (run.values[metric] ?? []).some((v) => v !== null);

function usableAxes(groups) {
  const runs = groups.flatMap((group) => group.runs);
  return Object.keys(AXES).filter((key) => !AXES[key].parts || runs.some((run) => AXES[key].parts.some((part) => hasValues(run, part))));
}

// What a run had sent, or how long it had trained, at the end of each recorded round.
function amounts(run, parts) {
  if (!parts) return run.rounds;
  if (!parts.some((part) => hasValues(run, part))) return run.rounds.map(() => null);
  let sum = 0;
  return run.rounds.map((_, i) => (sum += parts.reduce((s, part) => s + (run.values[part]?.[i] ?? 0), 0)));
}

function unitOf(axis, groups) {
  const all = groups.flatMap((group) => group.runs).map((run) => amounts(run, AXES[axis].parts).at(-1) ?? 0);
  const largest = all.reduce((best, v) => Math.max(best, v), 0);
  const [from, name, size] = AXES[axis].units.find(([least]) => largest >= least) ?? AXES[axis].units.at(-1);
  return { name, size: size ?? from };
}

function pointsOf(run, metric, axis, xSize, ySize) {
  const xs = amounts(run, AXES[axis].parts), ys = run.values[metric] ?? [];
  const points = run.rounds.map((round, i) => ({ round, x: xs[i], y: ys[i] ?? null }));
  return points.filter((p) => p.x !== null && p.y !== null).map((p) => ({ ...p, x: p.x / xSize, y: p.y / ySize }));
}

// In the rounds that all runs have, as in the tables.
function meanOf(runs) {
  const byRound = new Map();
  for (const point of runs.flat()) {
    if (!byRound.has(point.round)) byRound.set(point.round, []);
    byRound.get(point.round).push(point);
  }
  const shared = [...byRound.entries()].filter(([, points]) => points.length === runs.length);
  return shared.sort((a, b) => a[0] - b[0]).map(([round, points]) => averaged(round, points));
}

function averaged(round, points) {
  const mean = (values) => values.reduce((sum, v) => sum + v / values.length, 0);
  const x = mean(points.map((p) => p.x)), y = mean(points.map((p) => p.y));
  const spread = points.length > 1 ? Math.hypot(...points.map((p) => p.y - y)) / Math.sqrt(points.length - 1) : 0;
  const std = Number.isFinite(spread) ? spread : 0;
  return { round, x, y, std, low: y - std, high: y + std, count: points.length };
}

// Exponential average with its start corrected, so that the first value stays where it is.
function smoothed(points, keep) {
  if (keep === 0) return points;
  const keys = ["y", "low", "high"].filter((key) => points.length && key in points[0]);
  const sums = Object.fromEntries(keys.map((key) => [key, 0]));
  let weight = 0;
  return points.map((point) => {
    weight = keep * weight + 1;
    const next = { ...point };
    for (const key of keys) next[key] = (sums[key] = keep * sums[key] + point[key]) / weight;
    return next;
  });
}

function seriesOf(data, { metric, axis, smooth }) {
  const xUnit = unitOf(axis, data.groups), percent = data.percent.includes(metric);
  const lines = data.groups.map((group, place) => {
    const runs = group.runs.map((run) => pointsOf(run, metric, axis, xUnit.size, percent ? 0.01 : 1));
    const exact = meanOf(runs);
    return { place, label: group.label, exact, mean: smoothed(exact, smooth), runs: runs.map((run) => smoothed(run, smooth)) };
  });
  const target = metric in data.targets ? data.targets[metric] / (percent ? 0.01 : 1) : null;
  return { lines, target, xUnit: xUnit.name, yUnit: percent ? "%" : "" };
}
