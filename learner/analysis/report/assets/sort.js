"use strict";
// Tables of the class `sortable`: a column's button sorts by it, and again in the other order.
// Cells without a number come last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll("thead th")];
  const text = (row, column) => row.cells[column].textContent.trim();

  function compare(a, b, column, sign) {
    const [left, right] = [text(a, column), text(b, column)];
    if (!heads[column].classList.contains("number")) return sign * left.localeCompare(right);
    if (left === "-" || right === "-") return (left === "-") - (right === "-");
    return sign * (Number(left.replaceAll(",", "")) - Number(right.replaceAll(",", "")));
  }

  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const number = head.classList.contains("number");
    const sign = Number(head.dataset.sign ?? (number ? 1 : -1)) * -1;
    heads.forEach((each) => delete each.dataset.sign);
    head.dataset.sign = sign;
    body.append(...[...body.rows].sort((a, b) => compare(a, b, column, sign)));
  }));
}
