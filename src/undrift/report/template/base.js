// Building elements and writing numbers.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// One listener per control: what it does is told by the argument.
function onChange(id, act) {
  byId(id).addEventListener("input", (event) => act(event.target));
}

function niceStep(span, count, least) {
  const raw = Math.max(span / count, least, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((m) => m * power >= raw * 0.999999) * power;
}

function linearTicks([low, high], count, least = 0) {
  const step = niceStep(high - low, count, least);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9 && ticks.length < 50; i++) {
    ticks.push({ value: i * step, text: tickText(i * step, step) });
  }
  return ticks;
}

// Powers of ten, thinned out where there are many, with 2 and 5 between where there are few.
function logTicks([low, high], count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / count));
  const between = last - first <= 2 ? [1, 2, 5] : [1];
  const values = [];
  for (let e = first; e <= last; e += every) values.push(...between.map((m) => m * 10 ** e));
  const inside = values.filter((v) => v >= low * 0.999999 && v <= high * 1.000001);
  if (inside.length < 2) return linearTicks([low, high], count);
  return inside.map((value) => ({ value, text: tickText(value, value) }));
}

function tickText(value, step) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-4)) return String(Number(value.toPrecision(4)).toExponential());
  const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  return grouped(value.toFixed(Math.min(decimals, 8)));
}

// 12345.6 -> 12,345.6
function grouped(text) {
  const [whole, rest] = text.replace("-", "−").split(".");
  const spaced = whole.length > 5 ? whole.replace(/\B(?=(\d{3})+$)/g, ",") : whole;
  return rest === undefined ? spaced : `${spaced}.${rest}`;
}

const decimalsOf = (value) => (value === 0 ? 0 : clamp(3 - Math.floor(Math.log10(Math.abs(value))), 0, 6));

// As many decimals as the value beside it, unless nothing would be left.
function spreadText(spread, value, unit) {
  const text = spread.toFixed(unit === "%" ? 2 : decimalsOf(value));
  return Number(text) === 0 || spread >= 1e7 ? plainText(spread) : grouped(text);
}

function valueText(value, unit = "") {
  if (unit === "%") return `${grouped(value.toFixed(2))} %`;
  return unit ? `${plainText(value)} ${unit}` : plainText(value);
}

function plainText(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2).replace("-", "−").replace("e−", "e-");
  if (Number.isInteger(value)) return grouped(String(value));
  return grouped(value.toFixed(decimalsOf(value)));
}
