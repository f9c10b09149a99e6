// Sorting a table by a click on a column's name.

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// Whatever has no value stays at the end in both directions.
function inOrder(keys, column, direction) {
  const order = keys.map((_, i) => i), lacks = (i) => keys[i][column] === null;
  return order.sort((i, j) => lacks(i) - lacks(j) || (lacks(i) ? 0 : direction * compare(keys[i][column], keys[j][column])) || i - j);
}

function sortBy(body, rows, keys, headers, column) {
  const header = headers[column], numeric = keys.some((row) => typeof row[column] === "number");
  const before = header.getAttribute("aria-sort");
  const up = before ? before === "descending" : !numeric; // numbers: largest first
  headers.forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...inOrder(keys, column, up ? 1 : -1).map((i) => rows[i]));
}

function sortable(table, keys) {
  const headers = [...table.querySelectorAll("thead th")], body = table.tBodies[0], rows = [...body.rows];
  headers.forEach((header, column) => {
    const button = element("button", { type: "button" }, header.textContent.trim());
    button.addEventListener("click", () => sortBy(body, rows, keys, headers, column));
    header.replaceChildren(button);
  });
}

function startTable() {
  const table = byId("results");
  if (table) sortable(table, DATA.sort);
}
