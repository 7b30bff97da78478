// Sorts the tables inside an element of the class "sortable" by a click on the head of a column.
// Without this script the tables are as they were written.
"use strict";

(() => {
  const value = (row, column) => row.cells[column].innerText.trim();

  // cells that begin with a number are numbers; a dash is no value, and stays at the end
  const compare = (a, b, down) => {
    if (a === "–" || b === "–") return (a === "–") - (b === "–");
    const [x, y] = [parseFloat(a), parseFloat(b)];
    const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
    return down ? -order : order;
  };

  const sort = (table, head) => {
    const down = head.ariaSort === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => compare(value(a, head.cellIndex), value(b, head.cellIndex), down));
    table.tBodies[0].append(...rows);
  };

  for (const table of document.querySelectorAll(".sortable table")) {
    for (const head of table.tHead.rows[0].cells) {
      head.tabIndex = 0;
      head.style.cursor = "pointer";
      head.addEventListener("click", () => sort(table, head));
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter") sort(table, head);
      });
    }
  }
})();
