"use strict";
// Tables of the class `sortable`: a column's button sorts by it, and once more the other way.
// What has no number comes last both ways.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("thead th")];
  const body = table.tBodies[0];

  const text = (row, column) => row.cells[column].textContent.trim();

  function compare(a, b, column, sign) {
    const [left, right] = [text(a, column), text(b, column)];
    if (column === 0) return sign * left.localeCompare(right, undefined, { numeric: true });
    if (left === "-" || right === "-") return (left === "-") - (right === "-");
    return sign * (Number(left.replaceAll(",", "")) - Number(right.replaceAll(",", "")));
  }

  function sort(column) {
    const up = column === 0 ? "ascending" : "descending";
    const other = column === 0 ? "descending" : "ascending";
    const order = heads[column].getAttribute("aria-sort") === up ? other : up;
    heads.forEach((head, place) => head.setAttribute("aria-sort", place === column ? order : "none"));
    const sign = order === "ascending" ? 1 : -1;
    body.append(...[...body.rows].sort((a, b) => compare(a, b, column, sign)));
  }

  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));
}
