// Dragging a rectangle: flat ones zoom along x, narrow ones along y.

const SMALLEST = 12; // pixels that count as a move in a direction

function startDrag(view, event) {
  if (event.button !== 0) return;
  view.drag = spotOf(view, event);
  view.box.setPointerCapture?.(event.pointerId);
}

function spans(from, to) {
  const wide = Math.abs(to.x - from.x) >= SMALLEST, tall = Math.abs(to.y - from.y) >= 2.5 * SMALLEST;
  return { wide, tall };
}

function showDrag(view, event) {
  const from = view.drag, to = spotOf(view, event), { wide, tall } = spans(from, to);
  if (!wide && !tall) return;
  stopReading(view);
  const x = wide ? [Math.min(from.x, to.x), Math.max(from.x, to.x)] : [MARGIN.left, view.width - MARGIN.right];
  const y = tall ? [Math.min(from.y, to.y), Math.max(from.y, to.y)] : [MARGIN.top, view.height - MARGIN.bottom];
  byId("marks").replaceChildren(shape("rect", { class: "selection", x: x[0], y: y[0], width: x[1] - x[0], height: y[1] - y[0] }));
}

function endDrag(view, event) {
  const from = view.drag, to = spotOf(view, event);
  view.drag = null;
  const { wide, tall } = spans(from, to);
  if (!wide && !tall) return readPointer(view, event); // a tap
  const ordered = (a, b) => [Math.min(a, b), Math.max(a, b)];
  view.zoom = {
    x: wide ? ordered(view.x.back(from.x), view.x.back(to.x)) : view.zoom?.x ?? null,
    y: tall ? ordered(view.y.back(from.y), view.y.back(to.y)) : null,
  };
  draw(view);
  return undefined;
}

function resetZoom(view) {
  view.zoom = null;
  stopReading(view);
  draw(view);
}

function listenToPointer(view) {
  const { box } = view, onChart = (event) => view.svg.contains(event.target);
  box.addEventListener("pointerdown", (event) => onChart(event) && startDrag(view, event));
  box.addEventListener("pointermove", (event) => {
    if (view.drag) showDrag(view, event);
    else if (onChart(event)) readPointer(view, event);
  });
  box.addEventListener("pointerup", (event) => view.drag && endDrag(view, event));
  box.addEventListener("pointercancel", () => { view.drag = null; stopReading(view); });
  box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !view.drag && stopReading(view));
  // Not `onChart`: clicks of a captured pointer are told of the box.
  box.addEventListener("dblclick", (event) => event.target !== view.reset && resetZoom(view));
  box.addEventListener("keydown", (event) => readByKey(view, event));
  box.addEventListener("blur", () => stopReading(view));
  view.reset.addEventListener("click", () => { resetZoom(view); box.focus(); });
}
