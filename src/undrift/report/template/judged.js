// How good models are: one model at a time, sites sorted by any column.

function startJudged() {
  const articles = [...document.querySelectorAll("article.judged")];
  if (articles.length > 1) {
    fillSelect("judged", articles.map((article, i) => [String(i), article.querySelector("h3").textContent]));
    const show = (place) => articles.forEach((article, i) => { article.hidden = i !== place; });
    onChange("judged", (select) => show(Number(select.value)));
    byId("judged-controls").hidden = false;
    show(0);
  }
  for (const table of document.querySelectorAll("table.sites")) {
    const rows = [...table.tBodies[0].rows];
    sortable(table, rows.map((row) => [...row.cells].map(keyOf)));
  }
}

function keyOf(cell, column) {
  const key = cell.dataset.key;
  if (key === undefined) return null;
  return column === 0 ? key : Number(key);
}
