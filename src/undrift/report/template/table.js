// Sorting the results by a click on a column's name.

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// Whatever has no value stays at the end in both directions.
function inOrder(keys, column, direction) {
  const order = keys.map((_, i) => i), lacks = (i) => keys[i][column] === null;
  return order.sort((i, j) => lacks(i) - lacks(j) || (lacks(i) ? 0 : direction * compare(keys[i][column], keys[j][column])) || i - j);
}

function sortBy(body, rows, headers, column) {
  const header = headers[column], numeric = DATA.sort.some((keys) => typeof keys[column] === "number");
  const before = header.getAttribute("aria-sort");
  const up = before ? before === "descending" : !numeric; // numbers: largest first
  headers.forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...inOrder(DATA.sort, column, up ? 1 : -1).map((i) => rows[i]));
}

function startTable() {
  const table = byId("results");
  if (!table) return;
  const headers = [...table.querySelectorAll("thead th")], body = table.tBodies[0], rows = [...body.rows];
  headers.forEach((header, column) => {
    const button = element("button", { type: "button" }, header.textContent.trim());
    button.addEventListener("click", () => sortBy(body, rows, headers, column));
    header.replaceChildren(button);
  });
}
