
// The table of jobs: a click on a header sorts by its column, a second click reverses the order.
function sortable(table) {
  const key = (row, column) => {
    const { dataset, textContent } = row.cells[column];
    if (dataset.v === undefined) return textContent || null;
    return dataset.v === "" ? null : Number(dataset.v);
  };
  const compare = (one, other) => {
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
    return typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
  };
  table.tHead.addEventListener("click", (event) => {
    const header = event.target.closest("th");
    if (!header) return;
    const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const rows = [...table.tBodies[0].rows].map((row) => ({ row, value: key(row, header.cellIndex) }));
    const known = rows.filter(({ value }) => value !== null), unknown = rows.filter(({ value }) => value === null);
    known.sort((one, other) => sign * compare(one.value, other.value));
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    table.tBodies[0].replaceChildren(...[...known, ...unknown].map(({ row }) => row));
  });
}

document.querySelectorAll("table.jobs").forEach(sortable);
