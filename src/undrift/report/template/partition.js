// Who holds what: bubbles for few clients, a heat map of shares for many, sizes above.

const BUBBLES_UP_TO = 60;
const STRIP = 46; // height of the sizes above

// Not Math.max(...values): a call takes only so many arguments.
const largestOf = (values) => values.reduce((best, v) => Math.max(best, v), 0);
const sum = (values) => values.reduce((total, v) => total + v, 0);

function clientOrder(counts, by) {
  const order = counts.map((_, i) => i), sizes = counts.map(sum);
  const main = counts.map((row) => row.indexOf(largestOf(row)));
  const share = counts.map((row, i) => (sizes[i] ? row[main[i]] / sizes[i] : 0));
  if (by === "size") order.sort((i, j) => sizes[j] - sizes[i] || i - j);
  if (by === "class") order.sort((i, j) => main[i] - main[j] || share[j] - share[i] || i - j);
  return order;
}

function layoutOf(box, counts, classes) {
  const width = Math.max(280, box.clientWidth), longest = largestOf(classes.map((name) => name.length));
  const left = clamp(longest * 7 + 14, 34, Math.min(120, width * 0.3));
  const cell = (width - left - 8) / counts.length;
  const high = clamp(classes.length * 22, 90, 440);
  const top = STRIP + 24, rowHeight = Math.min(high / classes.length, Math.max(cell * 1.6, 20));
  return { width, left, top, cell, rowHeight, bottom: top + rowHeight * classes.length, height: top + rowHeight * classes.length + 44 };
}

function cut(text, letters) {
  return text.length > letters ? `${text.slice(0, letters - 1)}…` : text;
}

function drawSizes(at, counts, order) {
  const sizes = order.map((i) => sum(counts[i])), largest = largestOf(sizes) || 1, gap = at.cell > 6 ? at.cell * 0.25 : 0;
  const bars = sizes.map((size, k) => {
    const x = at.left + k * at.cell + gap / 2, y = 18 + STRIP * (1 - size / largest);
    return `M${x.toFixed(2)} ${18 + STRIP}V${y.toFixed(2)}h${(at.cell - gap).toFixed(2)}V${18 + STRIP}Z`;
  });
  return [
    shape("path", { class: "sizes", d: bars.join("") }),
    shape("text", { x: at.left, y: 11 }, `examples per client, up to ${grouped(String(largest))}`),
  ];
}

function drawBubbles(at, counts, order) {
  const largest = largestOf(counts.flat()) || 1, radius = Math.min(at.cell, at.rowHeight) * 0.48;
  const dots = order.flatMap((client, k) => counts[client].map((count, c) => ({ k, c, count }))).filter((dot) => dot.count > 0);
  return dots.map(({ k, c, count }) => shape("circle", {
    class: "bubble", cx: (at.left + (k + 0.5) * at.cell).toFixed(1), cy: (at.bottom - (c + 0.5) * at.rowHeight).toFixed(1),
    r: Math.max(0.6, radius * Math.sqrt(count / largest)).toFixed(2),
  }));
}

// One pixel per client and class, scaled up by the browser; the square root keeps small shares visible.
function drawHeat(at, counts, order, classes) {
  const canvas = element("canvas", { width: counts.length, height: classes.length }), context = canvas.getContext("2d");
  const pixels = context.createImageData(counts.length, classes.length);
  const [red, green, blue] = accentColour();
  order.forEach((client, k) => {
    const size = sum(counts[client]) || 1;
    counts[client].forEach((count, c) => {
      pixels.data.set([red, green, blue, Math.round(255 * Math.sqrt(count / size))], 4 * ((classes.length - 1 - c) * counts.length + k));
    });
  });
  context.putImageData(pixels, 0, 0);
  return [shape("image", {
    href: canvas.toDataURL(), x: at.left, y: at.top, width: at.cell * counts.length, height: at.bottom - at.top,
    preserveAspectRatio: "none", "image-rendering": at.cell >= 1 ? "pixelated" : "auto",
  })];
}

function accentColour() {
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
}

function drawNames(at, counts, order, classes, by) {
  const names = [], every = Math.ceil(15 / at.rowHeight), letters = Math.floor((at.left - 12) / 6.6);
  classes.forEach((name, c) => {
    if (c % every) return;
    names.push(shape("text", { x: at.left - 8, y: at.bottom - (c + 0.5) * at.rowHeight, dy: "0.35em", "text-anchor": "end" }, cut(name, letters)));
  });
  if (by === "id") {
    for (const { value, text } of linearTicks([0, counts.length - 1], Math.max(2, at.width / 80), 1)) {
      names.push(shape("text", { x: at.left + (value + 0.5) * at.cell, y: at.bottom + 17, "text-anchor": "middle" }, text));
    }
  }
  const how = { id: "client", size: "clients, largest first", class: "clients, by their most frequent class" }[by];
  names.push(shape("text", { class: "axis-name", x: at.left + (at.width - at.left) / 2, y: at.height - 6, "text-anchor": "middle" }, how));
  return names;
}

function drawGrid(at, counts, classes) {
  const rows = classes.map((_, c) => at.bottom - (c + 0.5) * at.rowHeight);
  return rows.map((y) => shape("line", { class: "grid", x1: at.left, x2: at.left + at.cell * counts.length, y1: y, y2: y }));
}

function drawPartition(view) {
  const { counts, classes } = DATA.partition, order = clientOrder(counts, view.by), at = layoutOf(view.box, counts, classes);
  const few = Math.max(counts.length, classes.length) <= BUBBLES_UP_TO;
  const svg = shape("svg", { viewBox: `0 0 ${at.width} ${at.height}`, role: "img", "aria-label": `Examples per client and class: ${counts.length} clients, ${classes.length} classes` });
  svg.append(...drawSizes(at, counts, order), ...(few ? drawGrid(at, counts, classes) : []));
  svg.append(...(few ? drawBubbles(at, counts, order) : drawHeat(at, counts, order, classes)), ...drawNames(at, counts, order, classes, view.by));
  const here = shape("rect", { class: "here", width: Math.max(at.cell, 2), height: at.rowHeight, visibility: "hidden" });
  svg.append(here);
  view.svg.replaceWith(svg);
  Object.assign(view, { svg, at, order, here });
  byId("partition-note").textContent = few
    ? `The area of a bubble is the number of examples; the largest stands for ${grouped(String(largestOf(counts.flat())))}.`
    : "The darker a cell, the larger the class's share of the client's examples (square root scale).";
}

function readPartition(view, event) {
  const { counts, classes } = DATA.partition, { at } = view, frame = view.svg.getBoundingClientRect(), ratio = at.width / frame.width;
  const k = Math.floor(((event.clientX - frame.left) * ratio - at.left) / at.cell);
  const c = Math.floor((at.bottom - (event.clientY - frame.top) * ratio) / at.rowHeight);
  const client = view.order[k];
  if (client === undefined || c < 0) return stopPartition(view);
  const size = sum(counts[client]), inside = c < classes.length;
  const text = inside ? `${classes[c]}: ${grouped(String(counts[client][c]))} of ${grouped(String(size))} examples` : `${grouped(String(size))} examples`;
  view.tip.replaceChildren(element("strong", {}, `client ${client}`), text);
  view.tip.hidden = false;
  const left = (at.left + k * at.cell) / ratio, room = view.box.clientWidth - view.tip.offsetWidth;
  view.tip.style.left = `${clamp(left + 14, 0, Math.max(0, room))}px`;
  view.tip.style.top = `${Math.max(0, (at.bottom - (c + 1) * at.rowHeight) / ratio - view.tip.offsetHeight - 8)}px`;
  view.here.setAttribute("visibility", inside ? "visible" : "hidden");
  view.here.setAttribute("x", at.left + k * at.cell - Math.max(0, 2 - at.cell) / 2);
  view.here.setAttribute("y", at.bottom - (c + 1) * at.rowHeight);
  return undefined;
}

function stopPartition(view) {
  view.tip.hidden = true;
  view.here.setAttribute("visibility", "hidden");
}

function startPartition() {
  if (!DATA.partition || !DATA.partition.counts.length || !DATA.partition.classes.length) return;
  const box = byId("partition"), svg = shape("svg"), tip = element("div", { class: "tip", hidden: "" });
  const view = { box, svg, tip, by: "id" };
  box.append(svg, tip);
  byId("partition-controls").hidden = false;
  onChange("order", (select) => { view.by = select.value; drawPartition(view); });
  box.addEventListener("pointermove", (event) => readPartition(view, event));
  box.addEventListener("pointerleave", () => stopPartition(view));
  whenResized(box, () => drawPartition(view));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawPartition(view));
}
