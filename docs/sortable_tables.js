// Sorts the tables inside an element of the class "sortable" by a click on the head of a column, and
// shows the rows that have every word of a field above them.
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

  const addFilter = (table) => {
    const chinese = document.documentElement.lang.startsWith("zh");
    const [field, count] = [document.createElement("input"), document.createElement("p")];
    field.type = "search";
    field.placeholder = chinese ? "筛选，例如：softmax Llama" : "filter, such as: softmax Llama";
    field.ariaLabel = field.placeholder;
    count.role = "status";
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = chinese ? `${rows.length} 行中的 ${shown} 行` : `${shown} of ${rows.length} rows`;
    });
    table.closest(".sortable").prepend(field, count);
  };

  for (const table of document.querySelectorAll(".sortable table")) {
    addFilter(table);
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
